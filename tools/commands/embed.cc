// megatron embed: a vector for each text of a file, from the hidden states of an encoder.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/npy.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/text_embedder.h"
#include "megatron/interop/huggingface/sentence_transformers.h"
#include "megatron/tensor/torch.h"
#include "tools/support/input_path.h"
#include "tools/support/load_model_flags.h"

namespace megatron {
namespace {

constexpr std::string_view kPoolings[] = {"auto", "mean", "mean-all", "cls", "pooler"};
enum class PoolingChoice { kAuto, kMean, kMeanAll, kCls, kPooler };
constexpr int64_t kUsualLength = 256;

struct EmbedConfig : Config {
  std::string input;
  std::string output;
  std::string json_key = "text";
  PoolingChoice pooling = PoolingChoice::kAuto;
  bool normalize = false;
  std::optional<int64_t> max_length;
  int64_t batch_tokens = 8192;

  void fields(FieldVisitor& v) override {
    v.group("embed");
    v.field("input", input,
            "texts (-: standard input), one a line; with .jsonl each line is an object");
    v.field("json_key", json_key, "where its text is");
    v.field("output", output,
            "a .npy file of fp32 [texts, hidden size], or a .jsonl file, each line an object with "
            "\"embedding\"; none: that is printed");
    v.choice("pooling", pooling, kPoolings,
             "vector of a text: the mean of its own tokens (mean), with [CLS] and [SEP] "
             "(mean-all), that of [CLS] (cls), or the pooler's output (pooler). auto: as the "
             "modules.json of sentence-transformers in the model's folder says, with its "
             "normalisation and length; else mean");
    v.field("normalize", normalize, "scale vectors to length 1");
    v.field("max_length", max_length,
            "tokens of a text with [CLS] and [SEP]; the rest is cut. none: 256, or the model's "
            "positions if there are fewer");
    v.field("batch_tokens", batch_tokens, "tokens of one forward pass, padding included");
  }
  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("--input is required", "a file of texts, one a line");
    violations.require(output.empty() || output.ends_with(".npy") || output.ends_with(".jsonl"),
                       cat("--output ", output, " ends neither in .npy nor in .jsonl"));
    violations.require(max_length.value_or(1) > 0,
                       cat("--max-length ", max_length.value_or(1), " must be positive"));
    violations.require(batch_tokens > 0, cat("--batch-tokens ", batch_tokens, " must be positive"));
  }
};

std::vector<std::string> read_texts(const EmbedConfig& config) {
  const bool objects = config.input.ends_with(".jsonl");
  std::vector<std::string> texts;
  const auto add = [&](std::string_view line, int64_t number) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!objects) {
      texts.emplace_back(line);
      return;
    }
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(object.is_object(), config.input, ":", number, ": expected a JSON object");
    MEGATRON_CHECK(object.contains(config.json_key) && object[config.json_key].is_string(),
                   config.input, ":", number, ": no string under \"", config.json_key,
                   "\"\nhint: --json-key names another member");
    texts.push_back(object[config.json_key]);
  };
  for_each_line_of(read_file(input_path(config.input)), add);
  MEGATRON_CHECK(!texts.empty(), config.input, " holds no texts");
  return texts;
}

EmbedOptions options_of(const EmbedConfig& config, const LoadedModel& model) {
  constexpr Pooling kGiven[] = {Pooling::kMean, Pooling::kMean, Pooling::kMeanAll, Pooling::kCls,
                                Pooling::kPooler};
  EmbedOptions options;
  options.pooling = kGiven[static_cast<size_t>(config.pooling)];
  options.normalize = config.normalize;
  options.batch_tokens = config.batch_tokens;
  const int64_t positions = max_positions(model.config);
  options.max_length = positions < 0 ? kUsualLength : std::min(positions, kUsualLength);
  if (config.pooling == PoolingChoice::kAuto) {
    if (const auto theirs = read_sentence_transformer(model.directory)) {
      options.pooling = theirs->mean ? Pooling::kMeanAll : Pooling::kCls;
      options.normalize |= theirs->normalize;
      if (theirs->max_length)
        options.max_length =
            positions < 0 ? *theirs->max_length : std::min(positions, *theirs->max_length);
    }
  }
  options.max_length = config.max_length.value_or(options.max_length);
  return options;
}

std::string json_lines(const at::Tensor& vectors) {
  std::string lines;
  const auto rows = vectors.accessor<float, 2>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    JsonWriter json;
    json.begin_object().key("embedding").begin_array();
    for (int64_t k = 0; k < rows.size(1); ++k) json.value(static_cast<double>(rows[i][k]));
    json.end_array().end_object();
    lines += json.text() + "\n";
  }
  return lines;
}

void write_vectors(const EmbedConfig& config, const at::Tensor& vectors) {
  if (config.output.empty()) {
    const std::string lines = json_lines(vectors);
    std::fwrite(lines.data(), 1, lines.size(), stdout);
    return;
  }
  if (config.output.ends_with(".jsonl"))
    return write_file_atomically(config.output, json_lines(vectors));
  AtomicFileWriter file(config.output);
  file.write(npy_header("<f4", vectors.sizes().vec()));
  file.write(vectors.const_data_ptr(), vectors.nbytes());
  file.commit();
}

}  // namespace

extern "C" int megatron_embed(int argc, char** argv) {
  LoadModelConfig load;
  EmbedConfig config;
  Config* const configs[] = {&load, &config};
  if (!parse_or_help("megatron embed DIR --input FILE --output vectors.npy [flags]", configs, argc,
                     argv, {.positional = "load"}))
    return 0;
  const std::vector<std::string> texts = read_texts(config);
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(load, groups);
  TextEmbedder embedder(*loaded.model, *loaded.tokenizer, options_of(config, loaded));
  write_vectors(config, embedder.embed(texts).contiguous());
  const auto count = [](size_t n) { return format_count(static_cast<uint64_t>(n)); };
  std::string what = cat("made ", count(texts.size()), " vectors of ",
                         loaded.config.transformer.hidden_size, " numbers");
  if (const int64_t cut = embedder.num_cut(); cut > 0)
    what += cat("; ", count(static_cast<size_t>(cut)), " texts were cut (--max-length)");
  log_info(what);
  return 0;
}

}  // namespace megatron
