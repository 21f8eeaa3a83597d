// megatron logits: the logits of a model for given token ids, as a safetensors file or as JSON.
#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/generator.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "tools/support/image_input.h"
#include "tools/support/load_model_flags.h"

namespace megatron {
namespace {

struct LogitsConfig : Config {
  std::vector<int64_t> tokens;
  std::string prompt;
  std::string output;
  int64_t top = 5;
  bool json = false;
  ImageConfig images;

  void fields(FieldVisitor& v) override {
    v.group("logits");
    v.field("tokens", tokens, "token ids: 1,2,3");
    v.field("prompt", prompt, "a text in place of token ids");
    v.field("output", output,
            "write tensors \"tokens\" [s] and \"logits\" [s, v] to this .safetensors file");
    v.field("top", top, "without --output: print this many likely next tokens");
    v.field("json", json, "print JSON");
    images.fields(v);
  }
  void validate(Violations& violations) const override {
    if (tokens.empty() == prompt.empty())
      violations.add("exactly one of --tokens and --prompt is needed");
    if (prompt.empty() && images.given())
      violations.add(cat(images.flag(), " with --tokens"), "give --prompt, a text");
    if (!images.given() && !images.media_model.empty())
      violations.add("--media-model has no effect without --image or --audio");
    if (!images.given() && !images.audio_media_model.empty())
      violations.add("--audio-media-model has no effect without --image or --audio");
    if (top <= 0) violations.add(cat("--top ", top, " must be positive"));
  }
};

std::vector<int32_t> token_ids(const LogitsConfig& config, const LoadedModel& model) {
  if (!config.prompt.empty()) return model.tokenizer->encode(config.prompt);
  std::vector<int32_t> ids;
  for (const int64_t id : config.tokens) {
    MEGATRON_CHECK(id >= 0 && id < model.config.vocab_size, "--tokens ", id,
                   " is outside the vocabulary of ", model.config.vocab_size);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

void write_output(const std::string& path, const std::vector<int32_t>& ids,
                  const at::Tensor& logits) {
  const auto length = static_cast<int64_t>(ids.size());
  const SafetensorsTensor tensors[] = {{"tokens", DType::kInt32, {length}, ids.data()},
                                       {"logits",
                                        to_dtype(logits.scalar_type()),
                                        {length, logits.size(1)},
                                        logits.const_data_ptr()}};
  write_safetensors(path, tensors);
  log_info(cat("wrote logits [", length, ", ", logits.size(1), "] to ", path));
}

void print_top(const LogitsConfig& config, const Tokenizer& tokenizer, const at::Tensor& logits) {
  const at::Tensor last = logits.select(0, logits.size(0) - 1).to(at::kDouble).log_softmax(-1);
  const auto [values, ids] = last.topk(std::min<int64_t>(config.top, last.size(0)));
  // A model may have ids that its tokenizer does not have.
  const auto bytes_of = [&](int32_t id) {
    return id < tokenizer.vocab_size() ? tokenizer.token_bytes(id) : std::string();
  };
  JsonWriter json(2);
  json.begin_array();
  for (int64_t i = 0; i < ids.size(0); ++i) {
    const auto id = static_cast<int32_t>(ids[i].item<int64_t>());
    const double logprob = values[i].item<double>();
    if (!config.json) {
      print_line(cat(id, "\t", logprob, "\t", json_quote(bytes_of(id))));
      continue;
    }
    json.begin_object()
        .member("id", id)
        .member("logprob", logprob)
        .member("token", bytes_of(id))
        .end_object();
  }
  json.end_array();
  if (config.json) print_line(json.text());
}

}  // namespace

extern "C" int megatron_logits(int argc, char** argv) {
  LoadModelConfig load;
  LogitsConfig config;
  Config* const configs[] = {&load, &config};
  if (!parse_or_help("megatron logits DIR --tokens 1,2,3 --output logits.safetensors [flags]",
                     configs, argc, argv, {.positional = "load"}))
    return 0;
  const ParallelGroups groups;
  const bool media = config.images.given();
  MultimodalRow row;
  row.caption = config.prompt;
  row.media = config.images.read();
  if (media)
    load.accept = [&](const ModelConfig& model, const Tokenizer*) {
      check_reads(kinds_of(row.media), model, load.load);
    };
  LoadedModel loaded = load_model(load, groups, /*tokenizer_required=*/!config.prompt.empty());
  ImagePrompt prompt;
  if (media)
    prompt =
        ImagePrompts(*loaded.model, *loaded.tokenizer, media_folders(config.images, loaded), "",
                     /*escape_literals=*/false)
            .of_text(row, "--prompt");
  const std::vector<int32_t> ids = media ? prompt.ids : token_ids(config, loaded);
  const at::Tensor result = full_logits(*loaded.model, ids, {}, prompt.media);
  if (!config.output.empty())
    write_output(config.output, ids, result);
  else
    print_top(config, *loaded.tokenizer, result);
  return 0;
}

}  // namespace megatron
