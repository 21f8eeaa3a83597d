#include "megatron/interop/load_model.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/foreign/gguf_file.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/gguf/gguf_model.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/import_weights.h"
#include "megatron/interop/torch_dist/torch_dist_arguments.h"
#include "megatron/interop/torch_dist/torch_dist_model.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/placement.h"
#include "megatron/pipeline_parallel/stage_division.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/batch_invariant.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kDummySeed = 1234;

// Replaces the path of a tokenizer file by the stored copy, if the checkpoint holds one of that
// name.
void use_stored(std::string& path, const Checkpoint& checkpoint) {
  if (path.empty()) return;
  fs::path given(path);
  if (given.filename().empty()) given = given.parent_path();  // "folder/"
  const fs::path folder = checkpoint.directory() / "tokenizer";
  std::string name = given.filename().string();
  if (!given.has_extension()) name = "tokenizer.json";  // the path names a folder
  if (!checkpoint.has_file("tokenizer/" + name)) return;
  checkpoint.read_file("tokenizer/" + name);  // verifies it
  path = (folder / name).string();
}

// The folder with the stored tokenizer files; empty: none are stored.
fs::path stored_tokenizer(const Checkpoint& checkpoint) {
  if (is_hf_folder(checkpoint.directory())) return checkpoint.directory();
  constexpr std::string_view kPrefix = "tokenizer/";
  bool any = false;
  for (const StoredFile& file : checkpoint.manifest().files) {
    if (!file.name.starts_with(kPrefix)) continue;
    any = true;
    if (file.name.find("chat_template") != std::string::npos ||
        file.name.ends_with("tokenizer_config.json"))
      checkpoint.read_file(file.name);  // verifies it
  }
  return any ? checkpoint.directory() / "tokenizer" : fs::path();
}

at::ScalarType stored_dtype(const Checkpoint& checkpoint, const ModelConfig& config) {
  const auto& tensors = checkpoint.manifest().tensors;
  const std::string table = word_embeddings_of(config.type);
  if (const auto found = tensors.find(table); found != tensors.end())
    return to_scalar_type(found->second.dtype);
  throw_error(cat(checkpoint.directory().string(), ": no tensor ", table,
                  "\nhint: this is no checkpoint of a ", find_model_type(config.type).title,
                  " model"));
}

StoredModel open_gguf_model(const LoadModelRequest& request) {
  MEGATRON_CHECK(!request.ckpt_step, "--ckpt-step is given, but ", request.load.string(),
                 " is a GGUF file");
  GgufModel model = open_gguf(request.load);
  MEGATRON_CHECK(model.tokenizer_problem.empty() || !request.tokenizer_required,
                 model.tokenizer_problem);
  const TokenizerConfig tokenizer = gguf_tokenizer(model);
  StoredModel found{std::move(model.folder.checkpoint), model.folder.model.config, tokenizer, {},
                    model.folder.model.family,          std::move(model.tokenizer)};
  if (!model.tokenizer_problem.empty())
    found.warnings.push_back(cat("no tokenizer: ", model.tokenizer_problem));
  return found;
}

// The configuration alone of a folder of Hugging Face.
StoredModel open_described_model(const LoadModelRequest& request) {
  MEGATRON_CHECK(is_hf_folder(request.load), request.load.string(),
                 ": holds no config.json of Hugging Face, from which a model with random weights "
                 "is made");
  MEGATRON_CHECK(request.dtype, "random weights have no stored type\nhint: --dtype bf16");
  const HfModel model = read_hf_config(request.load);
  return {Checkpoint(request.load, Manifest{}),
          model.config,
          hf_tokenizer(request.load, model.config.vocab_size),
          {"the weights are random: they are drawn, and not read"},
          model.family};
}

}  // namespace

StoredModel open_model(const LoadModelRequest& request) {
  constexpr const char* kHint =
      "\nhint: give the folder that --save of `megatron pretrain` named, one iter_* directory "
      "in it, a folder of Hugging Face with config.json and safetensors, or a GGUF file";
  if (request.dummy_weights) return open_described_model(request);
  if (is_gguf_file(request.load)) return open_gguf_model(request);
  MEGATRON_CHECK(fs::is_directory(request.load), request.load.string(),
                 fs::exists(request.load) ? ": is a file, not the folder of a model"
                                          : ": there is no such folder",
                 kHint);
  if (is_hf_folder(request.load)) {
    MEGATRON_CHECK(!request.ckpt_step, "--ckpt-step is given, but ", request.load.string(),
                   " is a folder of Hugging Face");
    HfFolder folder = open_hf_folder(request.load);
    return {std::move(folder.checkpoint),
            folder.model.config,
            hf_tokenizer(request.load, folder.model.config.vocab_size),
            {},
            folder.model.family};
  }
  if (const auto directory = find_torch_dist(request.load, request.ckpt_step)) {
    ForeignModel model = open_torch_dist_model(*directory, read_torch_dist_arguments(*directory));
    TokenizerConfig tokenizer;  // stored paths are those of another machine
    tokenizer.tokenizer_type = "NullTokenizer";
    tokenizer.vocab_size = model.config.vocab_size;
    return {std::move(model.checkpoint), model.config, tokenizer, {}};
  }
  StartRequest start;
  start.mode = StartMode::kResumeOrFresh;  // a folder without checkpoints is reported below
  start.load = request.load;
  start.ckpt_step = request.ckpt_step;
  const StartDecision decision = resolve_start(start, request.agreement);
  MEGATRON_CHECK(decision.checkpoint.has_value(), request.load.string(), ": holds no checkpoint",
                 kHint,
                 "\nhint: safetensors without a config.json become a checkpoint with "
                 "convert-checkpoint --name-map");
  Checkpoint checkpoint = Checkpoint::open_verified(decision.checkpoint->directory);
  StoredConfig stored = read_stored_config(checkpoint);
  StoredModel found{std::move(checkpoint), stored.model, stored.tokenizer, decision.warnings};
  found.config.transformer.remove_quantization();  // inference computes in the stored type
  for (std::string* path :
       {&found.tokenizer.tokenizer_model, &found.tokenizer.vocab_file, &found.tokenizer.merge_file})
    use_stored(*path, found.checkpoint);
  return found;
}

std::string stored_model_type(const Checkpoint& checkpoint) {
  const fs::path& directory = checkpoint.directory();
  if (is_hf_folder(directory)) return read_hf_config(directory).config.type;
  if (!checkpoint.has_file("config.yaml")) return ModelConfig().type;
  return read_model_type((directory / "config.yaml").string());
}

void check_model_type(const Checkpoint& checkpoint, const std::string& type) {
  const std::string stored = stored_model_type(checkpoint);
  MEGATRON_CHECK(stored == type, checkpoint.directory().string(), ": holds a model of type ",
                 stored, ", expected one of type ", type);
}

namespace {

std::unique_ptr<Tokenizer> tokenizer_of(StoredModel& found, bool required) {
  try {
    if (!found.tokenizer_texts.tokenizer.empty()) return make_tokenizer(found.tokenizer_texts);
    return make_tokenizer(found.tokenizer);
  } catch (const Error& error) {
    if (required || !found.tokenizer.vocab_size) throw;
    found.warnings.push_back(cat("no tokenizer: ", error.what()));
    TokenizerConfig null;
    null.tokenizer_type = "NullTokenizer";
    null.vocab_size = found.tokenizer.vocab_size;
    return make_tokenizer(null);
  }
}

void set_vocabulary(ModelConfig& config, const TokenizerConfig& tokenizer, int64_t vocab_size,
                    int64_t tensor_ranks) {
  config.vocab_size = vocab_size;
  config.padded_vocab_size = padded_vocab_size(tokenizer, vocab_size, tensor_ranks);
}

void quantize_linears(TransformerConfig& config, Fp8Recipe recipe) {
  MEGATRON_CHECK(recipe == Fp8Recipe::kBlockwise || recipe == Fp8Recipe::kTensorwise,
                 "weights are loaded in FP8 with the recipes blockwise and tensorwise");
  config.fp8_format = Fp8Format::kE4M3;
  config.fp8_recipe = recipe;
}

// --int8 and the model that is to be loaded.
void check_int8(const LoadModelRequest& request, const TransformerConfig& model,
                const std::string& type) {
  if (!request.int8) return;
  Violations violations;
  violations.require(request.device.is_cpu(), "--int8 multiplies on CPUs alone",
                     "--device cpu, or --fp8-format e4m3 on a GPU");
  violations.require(
      !request.batch_invariant,
      "--int8 with --batch-invariant-mode: no training multiplies in 8-bit "
      "integers, whose log-probabilities could be equal",
      "leave one out; with --int8 alone a request's numbers do not depend on others");
  const auto refuse = [&](bool is, const char* what) {
    violations.require(!is, cat("--int8 is not built for ", what), "leave --int8 out");
  };
  refuse(type != "gpt", "models other than decoder-only ones");
  refuse(model.has_moe(), "experts");
  refuse(model.multi_latent_attention, "multi-latent attention");
  refuse(model.is_hybrid(), "layers that have states");
  refuse(model.lora_rank > 0, "one adapter inside the model; serve takes adapters beside it");
  violations.throw_if_any();
}

LoadOptions load_options(const ParallelGroups& groups) {
  LoadOptions options;
  options.convert_dtype = true;
  options.allow_unexpected = {"optimizer.*", "fp8.*"};
  if (groups.pp.size() > 1) options.wanted_elsewhere = {"*"};
  return options;
}

// Every parameter that `is_wanted` takes, then every state, each with the memory that `next` gives.
std::vector<ShardedTensor> wanted_tensors(
    Model& model, const std::function<at::Tensor&(at::Tensor&)>& next,
    const std::function<bool(const std::string&)>& is_wanted) {
  std::vector<ShardedTensor> wanted;
  const ParallelGroups& groups = model.groups();
  model.visit([&](const std::string& name, Parameter& parameter) {
    at::Tensor& memory = next(parameter.value);
    if (is_wanted(name)) wanted.push_back(sharded_tensor(parameter, groups, name, memory));
  });
  model.visit_state([&](const std::string& name, at::Tensor& state) {
    at::Tensor& memory = next(state);
    if (is_wanted(name)) wanted.push_back(sharded_state(memory, groups, name));
  });
  return wanted;
}

// Into the memory of the model's store. `base`: the model without the adapter.
void read_values(const Checkpoint& checkpoint, const std::optional<Checkpoint>& adapter,
                 const ModelConfig& base, Model& model) {
  const auto own = [](at::Tensor& value) -> at::Tensor& { return value; };
  const auto of_adapter = [&](const std::string& name) {
    return adapter && (is_lora_parameter(name) || adapter->manifest().tensors.contains(name));
  };
  const LoadOptions options = load_options(model.groups());
  LoadOptions of_base = options;
  if (adapter)
    for (const std::string& name : replaced_parameters(base, model.config()))
      of_base.allow_unexpected.push_back(name);
  checkpoint.load(
      wanted_tensors(model, own, [&](const std::string& name) { return !of_adapter(name); }),
      of_base);
  if (adapter) adapter->load(wanted_tensors(model, own, of_adapter), options);
}

}  // namespace

StageSlice served_slice(const ModelConfig& config, int64_t stage, int64_t stages) {
  const TransformerConfig& t = config.transformer;
  const LayerShape token{.tokens = 1, .rows = 1};
  const EndsCost ends =
      find_model_type(config.type).ends_cost(config, {token, config.padded_vocab_size, 1});
  PipelineConfig named;
  named.hybrid = t.is_hybrid();
  if (std::ssize(t.hybrid_segments()) == stages) named.hybrid_segments = t.hybrid_segments();
  const bool equal = !t.is_hybrid() && t.num_layers % stages == 0;
  if (stages == 1 || equal || ends.first_stack > 0 || !named.hybrid_segments.empty())
    return make_stage_layout(named, stages, t.num_layers).slice(static_cast<int>(stage), 0);
  if (t.num_layers < stages)
    throw UsageError(cat("--pipeline-model-parallel-size ", stages, " is more than the ",
                         t.num_layers, " layers of the model"));
  StageLoads loads;
  for (int64_t layer = 1; layer <= t.num_layers; ++layer) {
    const LayerCost cost = model_layer_cost(config, layer, token, /*offloaded=*/false);
    loads.layers.push_back({cost.products(), cost.weight_products(), 0});
  }
  loads.head = {ends.head_products, ends.head_products, 0};
  loads.in_flight.assign(static_cast<size_t>(stages), 1.0);
  std::vector<StageSlice> slices;
  int64_t next = 0;
  for (const int64_t count : divide_over_stages(loads)) {
    slices.push_back({next, count, next == 0, false});
    next += count;
  }
  slices.back().head = true;
  return StageLayout(std::move(slices), static_cast<int>(stages), ChunkPlacement::kLooped)
      .slice(static_cast<int>(stage), 0);
}

DescribedModel describe_model(const LoadModelRequest& request, int64_t tensor_ranks) {
  DescribedModel described;
  if (is_hf_folder(request.load) && request.dtype) {
    described.config = read_hf_config(request.load).config;
    const int64_t vocab = described.config.vocab_size;
    set_vocabulary(described.config, hf_tokenizer(request.load, vocab), vocab, tensor_ranks);
    described.dtype = *request.dtype;
    if (request.accept) request.accept(described.config, nullptr);
    check_int8(request, described.config.transformer, described.config.type);
    if (request.fp8) quantize_linears(described.config.transformer, *request.fp8);
    return described;
  }
  MEGATRON_CHECK(!is_hf_folder(request.load) || fs::exists(request.load / kHfIndex) ||
                     fs::exists(request.load / kHfSafetensors),
                 request.load.string(), ": holds no weights that say what type they have",
                 "\nhint: --dtype bf16");
  StoredModel found = open_model(request);
  described.config = found.config;
  const std::optional<int64_t> vocab = found.tokenizer.vocab_size;
  set_vocabulary(described.config, found.tokenizer,
                 vocab ? *vocab : tokenizer_of(found, /*required=*/true)->vocab_size(),
                 tensor_ranks);
  described.dtype = request.dtype.value_or(stored_dtype(found.checkpoint, found.config));
  if (request.accept) request.accept(described.config, nullptr);
  check_int8(request, described.config.transformer, described.config.type);
  if (request.fp8) quantize_linears(described.config.transformer, *request.fp8);
  return described;
}

const HfFamily& LoadedModel::family() const {
  return stored_family != nullptr ? *stored_family : family_of_model(Checkpoint(directory), config);
}

LoadedModel load_model(const LoadModelRequest& request, const ParallelGroups& groups) {
  StoredModel found = open_model(request);
  const Checkpoint& checkpoint = found.checkpoint;
  LoadedModel loaded;
  loaded.iteration = checkpoint.iteration();
  loaded.directory = checkpoint.directory();
  loaded.stored_family = found.family;
  loaded.tokenizer = tokenizer_of(found, request.tokenizer_required);
  loaded.chat_templates =
      found.tokenizer_texts.config.empty()
          ? TemplateSource(stored_tokenizer(checkpoint))
          : TemplateSource(found.tokenizer_texts.config, found.tokenizer_texts.name);
  loaded.end_of_text = end_of_text_ids(checkpoint);
  loaded.decoder_start = decoder_start_id(checkpoint);
  loaded.warnings = std::move(found.warnings);
  loaded.config = found.config;
  set_vocabulary(loaded.config, found.tokenizer,
                 found.tokenizer.vocab_size.value_or(loaded.tokenizer->vocab_size()),
                 groups.tp.size());

  std::optional<Checkpoint> adapter;
  if (!request.adapter.empty()) {
    MEGATRON_CHECK(loaded.config.transformer.lora_rank == 0, "--adapter ", request.adapter.string(),
                   ": ", checkpoint.directory().string(), " holds adapters already");
    adapter = open_peft_folder(request.adapter, loaded.family(), loaded.config);
  }
  if (request.accept) request.accept(loaded.config, loaded.tokenizer.get());
  check_int8(request, loaded.config.transformer, loaded.config.type);
  if (request.fp8) quantize_linears(loaded.config.transformer, *request.fp8);
  loaded.dtype = request.dtype ? *request.dtype : stored_dtype(checkpoint, loaded.config);
  if (request.batch_invariant)
    check_batch_invariant(loaded.config.transformer, request.device, loaded.dtype,
                          groups.tp.size());
  set_batch_invariant(request.batch_invariant);
  loaded.model = make_model(loaded.config, groups,
                            served_slice(loaded.config, groups.pp.rank(), groups.pp.size()));
  loaded.store =
      std::make_unique<ForwardParameterStore>(*loaded.model, loaded.dtype, request.device);
  if (request.dummy_weights) {
    loaded.store->place_drawn(kDummySeed, groups);
  } else {
    read_values(checkpoint, adapter, found.config, *loaded.model);
    loaded.store->place();
  }
  if (request.int8) loaded.store->use_int8();
  return loaded;
}

namespace {

void check_architecture(const fs::path& folder, const ModelConfig& found,
                        const ModelConfig& expected) {
  MEGATRON_CHECK(found.type == expected.type, folder.string(), ": holds a model of type ",
                 found.type, ", expected one of type ", expected.type);
  const std::string difference = architecture_difference(found.transformer, expected.transformer);
  MEGATRON_CHECK(difference.empty(), folder.string(), ": holds another model: ", difference);
}

}  // namespace

std::vector<at::Tensor> read_weights(const LoadModelRequest& request, Model& model) {
  MEGATRON_ASSERT(request.dtype, "the model's type is not given");
  const StoredModel found = open_model(request);
  check_architecture(request.load, found.config, model.config());
  std::vector<at::Tensor> values;
  model.visit([&](const std::string&, Parameter& parameter) {
    values.push_back(
        at::zeros(parameter.local_shape, at::dtype(value_type(parameter, *request.dtype))));
  });
  model.visit_state([&](const std::string&, at::Tensor& state) {
    values.push_back(at::empty_like(state, state.options().device(at::kCPU)));
  });
  size_t next = 0;
  const std::vector<ShardedTensor> wanted = wanted_tensors(
      model, [&](at::Tensor&) -> at::Tensor& { return values[next++]; },
      [](const std::string&) { return true; });
  found.checkpoint.load(wanted, load_options(model.groups()));
  return values;
}

}  // namespace megatron
