// megatron seq2seq: texts that an encoder-decoder writes for those of a file, and how well they
// meet the targets there.
#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/tuning/text_to_text.h"
#include "megatron/inference/evaluation/text_metrics.h"
#include "megatron/inference/generator.h"
#include "megatron/models/t5/t5_config.h"
#include "tools/support/load_model_flags.h"

namespace megatron {
namespace {

struct TextToTextCommandConfig : Config {
  std::string input;
  std::string log_samples;
  std::optional<int64_t> tokens_to_generate;

  void fields(FieldVisitor& v) override {
    v.group("seq2seq");
    v.field("input", input, "JSON lines, {\"input\", \"target\" (optional)}");
    v.field("log_samples", log_samples,
            "write prediction and target of every text to this .jsonl file");
    v.field("tokens_to_generate", tokens_to_generate,
            "tokens of a text at most, with its end. none: as many as the targets that the model "
            "was trained on may have, of folders of Hugging Face 128");
  }
  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("--input is required", "a .jsonl file");
    violations.require(
        tokens_to_generate.value_or(1) > 0,
        cat("--tokens-to-generate ", tokens_to_generate.value_or(1), " must be positive"));
  }
};

constexpr int64_t kUsualTokens = 128;

int64_t tokens_of_text(const ModelConfig& model, const TextToTextCommandConfig& config) {
  if (config.tokens_to_generate) return *config.tokens_to_generate;
  const int64_t trained = model.own.as_or_default<T5Config>().decoder_seq_length,
                limit = max_positions(model), usual = trained > 0 ? trained : kUsualTokens;
  return limit < 0 ? usual : std::min(usual, limit - 1);
}

std::vector<std::string> write_texts(LoadedModel& loaded, const std::vector<TextToText>& texts,
                                     int64_t tokens) {
  GenerateOptions options;
  options.sampling.greedy = true;
  options.tokens_to_generate = tokens;
  options.skip_special_tokens = true;
  options.cut_input = true;
  options.decoder_start = loaded.decoder_start;
  if (!loaded.end_of_text.empty()) options.end_of_input = loaded.end_of_text.front();
  std::vector<std::string> inputs, written;
  for (const TextToText& text : texts) inputs.push_back(text.input);
  for (Generation& one : generate(*loaded.model, *loaded.tokenizer, inputs, options))
    written.push_back(std::move(one.text));
  return written;
}

void log_texts(const std::string& path, const std::vector<TextToText>& texts,
               const std::vector<std::string>& written) {
  std::string lines;
  for (size_t i = 0; i < texts.size(); ++i) {
    JsonWriter json;
    json.begin_object().member("id", i).member("prediction", written[i]);
    if (texts[i].target) json.member("target", *texts[i].target);
    lines += json.end_object().text() + "\n";
  }
  write_file_atomically(path, lines);
}

// None: the file has no targets.
std::vector<std::string> targets_of(const std::string& path, const std::vector<TextToText>& texts) {
  std::vector<std::string> targets;
  for (const TextToText& text : texts) {
    const bool has_all = text.target.has_value() == texts.front().target.has_value();
    MEGATRON_CHECK(has_all, path, ":", text.line, ": has ", text.target ? "a" : "no",
                   " \"target\", unlike the lines before it");
    if (text.target) targets.push_back(*text.target);
  }
  return targets;
}

}  // namespace

extern "C" int megatron_seq2seq(int argc, char** argv) {
  LoadModelConfig load;
  TextToTextCommandConfig config;
  Config* const configs[] = {&load, &config};
  if (!parse_or_help("megatron seq2seq DIR --input FILE [flags]", configs, argc, argv,
                     {.positional = "load"}))
    return 0;
  const std::vector<TextToText> texts = read_text_to_text(config.input);
  const std::vector<std::string> targets = targets_of(config.input, texts);
  const ParallelGroups groups;
  LoadedModel loaded = load_model(load, groups);
  MEGATRON_CHECK(loaded.model->sequence_input() == SequenceInputUse::kRequired,
                 "the model is of type ", loaded.config.type,
                 ", which writes no texts for others; this needs an encoder-decoder",
                 "\nhint: a T5, or a folder of Hugging Face of a model of type t5 or mt5");
  const std::vector<std::string> written =
      write_texts(loaded, texts, tokens_of_text(loaded.config, config));
  if (!config.log_samples.empty()) log_texts(config.log_samples, texts, written);
  JsonWriter json(2);
  json.begin_object().member("texts", texts.size());
  if (!targets.empty())
    for (const auto& [name, value] : text_metrics(written, targets)) json.member(name, value);
  json.end_object();
  print_line(json.text());
  return 0;
}

}  // namespace megatron
