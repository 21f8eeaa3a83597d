// megatron convert-checkpoint: converts between Hugging Face folders, our checkpoints and those of
// Megatron-LM; and from any safetensors, by a map of names.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <span>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/progress.h"
#include "megatron/base/threads.h"
#include "megatron/base/value_checks.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/foreign/gguf_file.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/generator.h"
#include "megatron/interop/gguf/gguf_model.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/load_model.h"
#include "megatron/interop/name_map.h"
#include "megatron/interop/torch_dist/torch_dist_arguments.h"
#include "megatron/interop/torch_dist/torch_dist_convert.h"
#include "megatron/interop/torch_dist/torch_dist_model.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

enum class Form { kAuto, kHuggingFace, kMegatron, kTorchDist, kSafetensors, kGguf };
constexpr std::string_view kForms[] = {"auto",       "huggingface", "megatron",
                                       "torch_dist", "safetensors", "gguf"};
// Formats that can be written.
constexpr std::span<const std::string_view> kTargets = std::span(kForms).first(4);

struct ConvertConfig : Config {
  std::string load;
  std::string save;
  Form to = Form::kAuto;
  std::optional<int64_t> ckpt_step;
  std::string hf_model_type;
  double max_shard_gb = 5.0;
  std::string name_map;
  std::string adapter;
  bool merge_adapter = false;
  std::string probe;
  double probe_tolerance = 1e-4;
  bool json = false;
  int64_t num_threads = 0;

  void fields(FieldVisitor& v) override {
    v.group("convert-checkpoint");
    v.field({"load", "--load --load-dir"}, load,
            "a folder of Hugging Face, a GGUF file, a folder of checkpoints, or one checkpoint; of "
            "ours or of Megatron-LM (torch_dist); with --name-map a .safetensors file or a folder "
            "of them");
    v.field({"save", "--save --save-dir"}, save, "the folder to write");
    v.choice("to", to, kTargets,
             "what to write: huggingface, megatron (checkpoints of ours) or torch_dist (of "
             "Megatron-LM); "
             "auto: huggingface from ours, else ours");
    v.field("ckpt_step", ckpt_step, "take this iteration instead of the newest");
    v.field("hf_model_type", hf_model_type,
            "family to write (llama, gpt2, ...); empty: that which the checkpoint came from, else "
            "the first that can be this model");
    v.field("max_shard_gb", max_shard_gb, "largest safetensors file to write, in GB of 10^9 bytes");
    v.field("name_map", name_map,
            "a YAML or JSON file that says which tensors of --load make up each parameter: for "
            "safetensors of no known family. The flags of the model give its shape");
    v.field("adapter", adapter,
            "with a folder of Hugging Face: a folder of PEFT, whose adapters go into the "
            "checkpoint beside the weights");
    v.field("merge_adapter", merge_adapter,
            "of a checkpoint with adapters: add them to the weights and write the model; without "
            "this, the adapters alone are written, as PEFT does");
    v.field("probe", probe,
            "a .safetensors file with \"tokens\" [s] and \"logits\" [s, v] of the model that was "
            "converted (as `megatron logits` "
            "writes): what was written must give these logits in fp32");
    v.field("probe_tolerance", probe_tolerance,
            "largest relative difference from the logits of --probe, by position");
    v.field("json", json, "print JSON");
    v.field("num_threads", num_threads, kNumThreadsHelp);
  }
  void validate(Violations& violations) const override {
    if (load.empty())
      violations.add("--load is required", "a folder of Hugging Face, or of checkpoints");
    if (save.empty()) violations.add("--save is required", "a new folder");
    if (!(max_shard_gb > 0))
      violations.add(cat("--max-shard-gb ", max_shard_gb, " must be positive"));
    if (!(probe_tolerance > 0))
      violations.add(cat("--probe-tolerance ", probe_tolerance, " must be positive"));
    at_least(violations, "--num-threads", num_threads, 0);
  }
};

at::Tensor read_tensor(const SafetensorsFile& file, const char* name) {
  const SafetensorsEntry& entry = file.entry(name);
  at::Tensor tensor = at::empty(entry.shape, to_scalar_type(entry.dtype));
  file.read(entry, tensor.data_ptr());
  return tensor;
}

// The largest relative difference of a row of logits; throws if it is above the tolerance.
double run_probe(const ConvertConfig& config, const std::string& written) {
  const SafetensorsFile file(config.probe);
  const at::Tensor tokens = read_tensor(file, "tokens").to(at::kInt).flatten().contiguous();
  const at::Tensor expected = read_tensor(file, "logits").to(at::kDouble);
  MEGATRON_CHECK(expected.dim() == 2 && expected.size(0) == tokens.numel(), config.probe,
                 ": logits must be [", tokens.numel(), ", v] for its ", tokens.numel(), " tokens");
  LoadModelRequest request;
  request.load = written;
  MEGATRON_CHECK(!is_peft_folder(written), "--probe: ", written,
                 " holds only adapters, which give no logits without their base model",
                 "\nhint: --merge-adapter writes the whole model");
  request.dtype = at::kFloat;
  request.tokenizer_required = false;
  const ParallelGroups groups;
  const LoadedModel model = load_model(request, groups);
  const at::Tensor logits = full_logits(*model.model, {tokens.const_data_ptr<int32_t>(),
                                                       static_cast<size_t>(tokens.numel())})
                                .to(at::kDouble);
  MEGATRON_CHECK(logits.sizes() == expected.sizes(), config.probe, ": has logits of ",
                 expected.size(1), " ids, the model has ", logits.size(1));
  const at::Tensor difference =
      (logits - expected).norm(2, -1) / expected.norm(2, -1).clamp_min(1e-30);
  const double worst = difference.max().item<double>();
  MEGATRON_CHECK(worst <= config.probe_tolerance, "the logits of ", written,
                 " differ from those of ", config.probe, " by ", worst, " at position ",
                 difference.argmax().item<int64_t>(), "; --probe-tolerance is ",
                 config.probe_tolerance,
                 "\nhint: the names and shapes of the tensors fit, but their content is not that "
                 "of the model: another rotary "
                 "form, gate and up exchanged, or another model");
  return worst;
}

std::string name_of(Form form) { return std::string(kForms[static_cast<size_t>(form)]); }

void print_result(const ConvertConfig& config, const ConvertResult& result, Form from, Form to,
                  std::optional<double> probe) {
  if (!config.json) {
    for (const std::string& name : result.waived)
      log_info(cat("holds no weights and was left out: ", name));
    if (probe) log_info(cat("the logits of ", config.probe, " are reproduced to ", *probe));
    print_line(cat("wrote ", result.directory.string(), ": ", result.num_tensors, " tensors of a ",
                   result.model_type, " model, ", format_bytes(static_cast<double>(result.bytes))));
    return;
  }
  JsonWriter json(2);
  json.begin_object().member("from", name_of(from)).member("to", name_of(to));
  json.member("directory", result.directory.string()).member("model_type", result.model_type);
  json.member("iteration", result.iteration)
      .member("num_tensors", result.num_tensors)
      .member("bytes", result.bytes);
  json.member("files", result.files).member("waived", result.waived);
  if (probe) json.member("probe_difference", *probe);
  json.end_object();
  print_line(json.text());
}

ConvertResult import_from_torch_dist(const ConvertConfig& config,
                                     const TransformerConfig& transformer,
                                     const TokenizerConfig& tokenizer,
                                     const ConvertProgress& progress) {
  TorchDistImport request;
  request.directory = *find_torch_dist(config.load, config.ckpt_step);
  request.root = config.save;
  request.transformer = transformer;
  request.tokenizer = tokenizer;
  return import_torch_dist(request, progress);
}

ConvertResult import_from_safetensors(const ConvertConfig& config,
                                      const TransformerConfig& transformer,
                                      const TokenizerConfig& tokenizer,
                                      const ConvertProgress& progress) {
  NameMapImport request;
  request.source = config.load;
  request.name_map = config.name_map;
  request.root = config.save;
  request.transformer = transformer;
  request.tokenizer = tokenizer;
  return import_by_name_map(request, progress);
}

ConvertResult export_to(Form to, const ConvertConfig& config, const ConvertProgress& progress) {
  ExportRequest request;
  request.load = config.load;
  request.ckpt_step = config.ckpt_step;
  request.folder = config.save;
  request.model_type = config.hf_model_type;
  request.max_shard_bytes = static_cast<uint64_t>(config.max_shard_gb * 1e9);
  request.merge_adapter = config.merge_adapter;
  return to == Form::kTorchDist ? export_torch_dist(request, progress)
                                : export_hf_folder(request, progress);
}

// A .safetensors file, or a folder with such files but no configuration.
bool is_bare_safetensors(const std::filesystem::path& path) {
  const auto is_file = [](const std::filesystem::path& file) {
    std::error_code ignored;
    return file.extension() == ".safetensors" && std::filesystem::is_regular_file(file, ignored);
  };
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return is_file(path);
  if (std::filesystem::exists(path / kManifestName, ignored) || !find_checkpoints(path).empty())
    return false;
  const std::filesystem::directory_iterator items(path);
  return std::any_of(begin(items), end(items), [&](const auto& item) { return is_file(item); });
}

// Format of --load.
Form form_of(const ConvertConfig& config) {
  if (!config.name_map.empty()) return Form::kSafetensors;
  if (is_hf_folder(config.load)) return Form::kHuggingFace;
  if (is_gguf_file(config.load)) return Form::kGguf;
  if (find_torch_dist(config.load, config.ckpt_step)) return Form::kTorchDist;
  MEGATRON_CHECK(
      !is_bare_safetensors(config.load), config.load,
      ": holds safetensors, and neither a config.json that names a model nor a checkpoint",
      "\nhint: --name-map FILE says which of their tensors make up each parameter");
  return Form::kMegatron;
}

Form choose_target(const ConvertConfig& config, Form from) {
  const Form to = config.to != Form::kAuto  ? config.to
                  : from == Form::kMegatron ? Form::kHuggingFace
                                            : Form::kMegatron;
  MEGATRON_CHECK(from != to, "--to ", name_of(to), ": ", config.load, " is in that format already");
  MEGATRON_CHECK(from == Form::kHuggingFace || from == Form::kMegatron || to == Form::kMegatron,
                 "--to ", name_of(to), ": ", config.load, " is in the format ", name_of(from),
                 ", which becomes a checkpoint of ours first\nhint: convert in two steps");
  MEGATRON_CHECK(from != Form::kSafetensors || !config.ckpt_step,
                 "--ckpt-step has no effect on safetensors");
  MEGATRON_CHECK(to == Form::kHuggingFace || config.hf_model_type.empty(),
                 "--hf-model-type has no effect: a folder of Hugging Face is not what is written");
  const bool is_model = from == Form::kHuggingFace || from == Form::kGguf;
  const char* const kind = from == Form::kGguf ? "a GGUF file" : "a folder of Hugging Face";
  MEGATRON_CHECK(!is_model || !config.ckpt_step, "--ckpt-step has no effect on ", kind);
  MEGATRON_CHECK(!is_model || !config.merge_adapter,
                 "--merge-adapter has an effect on checkpoints, ", config.load, " is ", kind,
                 "\nhint: convert it with --adapter, then convert the "
                 "checkpoint with --merge-adapter");
  MEGATRON_CHECK(to == Form::kHuggingFace || !config.merge_adapter,
                 "--merge-adapter has an effect where a folder of Hugging Face is written");
  MEGATRON_CHECK(is_model || config.adapter.empty(),
                 "--adapter has an effect on a folder of Hugging Face, ", config.load, " is none");
  MEGATRON_CHECK(to == Form::kMegatron || config.adapter.empty(),
                 "--adapter has an effect where a checkpoint of ours is written");
  return to;
}

}  // namespace

extern "C" int megatron_convert_checkpoint(int argc, char** argv) {
  ConvertConfig config;
  TransformerConfig transformer;
  TokenizerConfig tokenizer;
  Config* const configs[] = {&config, &transformer, &tokenizer};
  Form from = Form::kAuto;
  try {
    if (parse_flags(configs, argc, argv, {.positional = "load"}).help) {
      print_line(help_text(
          "megatron convert-checkpoint DIR --save DIR [flags]; those of the model and its "
          "tokenizer are for checkpoints of Megatron-LM and for --name-map",
          configs));
      return 0;
    }
  } catch (const UsageError&) {
    // The main parse reports errors; this one only looks for --load.
  }
  if (!config.load.empty()) from = form_of(config);
  // A Megatron-LM checkpoint's arguments are the defaults of the model's flags.
  const bool model_flags = from == Form::kTorchDist || from == Form::kSafetensors;
  if (model_flags) {
    transformer = TransformerConfig();
    tokenizer = TokenizerConfig();
  }
  if (from == Form::kTorchDist)
    transformer = read_torch_dist_arguments(*find_torch_dist(config.load, config.ckpt_step));
  config = ConvertConfig();
  ParseOptions parse;
  parse.positional = "load";
  parse.finalize = [&] {
    if (model_flags) transformer.finalize();
  };
  parse_flags(std::span(configs, model_flags ? 3 : 1), argc, argv, parse);
  const Form to = choose_target(config, from);
  use_threads(config.num_threads);

  std::unique_ptr<ProgressBar> bar;
  const ConvertProgress progress = [&](uint64_t total, uint64_t bytes) {
    if (!bar) bar = std::make_unique<ProgressBar>("converting " + config.load, total, "B");
    bar->advance(bytes);
  };
  ConvertResult result;
  if (from == Form::kTorchDist)
    result = import_from_torch_dist(config, transformer, tokenizer, progress);
  else if (from == Form::kSafetensors)
    result = import_from_safetensors(config, transformer, tokenizer, progress);
  else if (from == Form::kGguf)
    result = import_gguf(config.load, config.save, progress, config.adapter);
  else if (to == Form::kMegatron)
    result = import_hf_folder(config.load, config.save, progress, config.adapter);
  else
    result = export_to(to, config, progress);
  if (bar) bar->finish();
  for (const std::string& warning : result.warnings) log_warning(warning);
  std::optional<double> probe;
  if (!config.probe.empty()) probe = run_probe(config, config.save);
  print_result(config, result, from, to, probe);
  return 0;
}

}  // namespace megatron
