// megatron classify: classes of texts by a model of `finetune --task classify`, and how well they
// meet the labels of a file.
#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/evaluation/classification_metrics.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/text_classifier.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/tensor/torch.h"
#include "tools/support/load_model_flags.h"

namespace megatron {
namespace {

struct ClassifyTextsConfig : Config {
  std::string input;
  std::string log_samples;
  std::vector<std::string> labels;
  std::optional<int64_t> max_length;
  int64_t batch_tokens = 8192;

  void fields(FieldVisitor& v) override {
    v.group("classify");
    v.field("input", input,
            "a .tsv file of GLUE, or JSON lines, {\"text\", \"text_b\" (optional), \"label\"}");
    v.field("labels", labels, "names of the classes, as the file spells them; none: 0, 1, ...");
    v.field("log_samples", log_samples,
            "write logits, prediction and label of every text to this .jsonl file");
    v.field("max_length", max_length,
            "tokens of a text or a pair with [CLS] and [SEP]; the rest is cut. none: as the model "
            "was trained");
    v.field("batch_tokens", batch_tokens, "tokens of one forward pass, padding included");
  }
  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("--input is required", "a .tsv or .jsonl file");
    violations.require(max_length.value_or(4) > 3,
                       cat("--max-length ", max_length.value_or(4), " is less than 4"));
    violations.require(batch_tokens > 0, cat("--batch-tokens ", batch_tokens, " must be positive"));
  }
};

// Class or number of each text.
std::vector<double> predictions_of(const at::Tensor& logits) {
  const at::Tensor chosen =
      (logits.size(1) == 1 ? logits.squeeze(1) : logits.argmax(1)).to(at::kDouble).contiguous();
  return {chosen.const_data_ptr<double>(), chosen.const_data_ptr<double>() + chosen.numel()};
}

void log_texts(const ClassifyTextsConfig& config, const std::vector<LabelledText>& texts,
               const at::Tensor& logits, const std::vector<double>& predicted) {
  std::string lines;
  const auto rows = logits.accessor<float, 2>();
  for (size_t i = 0; i < texts.size(); ++i) {
    JsonWriter json;
    json.begin_object().member("id", i).key("logits").begin_array();
    for (int64_t k = 0; k < logits.size(1); ++k)
      json.value(static_cast<double>(rows[static_cast<int64_t>(i)][k]));
    json.end_array().member("prediction", predicted[i]);
    if (texts[i].label) json.member("label", *texts[i].label);
    lines += json.end_object().text() + "\n";
  }
  write_file_atomically(config.log_samples, lines);
}

std::vector<NamedMetric> metrics_of(const std::vector<LabelledText>& texts,
                                    const std::vector<double>& predicted, int64_t classes) {
  std::vector<double> labels;
  for (const LabelledText& text : texts)
    if (text.label) labels.push_back(*text.label);
  if (labels.empty()) return {};  // a file to predict
  MEGATRON_CHECK(labels.size() == texts.size(), "some texts have a label and others have none");
  if (classes == 1) return number_metrics(predicted, labels);
  const std::vector<int64_t> guesses(predicted.begin(), predicted.end()),
      classes_of(labels.begin(), labels.end());
  return class_metrics(guesses, classes_of, classes);
}

}  // namespace

extern "C" int megatron_classify(int argc, char** argv) {
  LoadModelConfig load;
  ClassifyTextsConfig config;
  Config* const configs[] = {&load, &config};
  if (!parse_or_help("megatron classify DIR --input FILE [flags]", configs, argc, argv,
                     {.positional = "load"}))
    return 0;
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(load, groups);
  const int64_t classes = num_classes(loaded.config);
  const int64_t positions = max_positions(loaded.config),
                trained = loaded.config.transformer.seq_length;
  const LabelledFile file =
      read_labelled_texts(config.input, {std::max<int64_t>(1, classes), config.labels});
  const int64_t usual = positions < 0 ? trained : std::min(positions, trained);
  const at::Tensor logits =
      classify_texts(*loaded.model, *loaded.tokenizer, file.texts,
                     {config.max_length.value_or(usual), config.batch_tokens});
  const std::vector<double> predicted = predictions_of(logits);
  if (!config.log_samples.empty()) log_texts(config, file.texts, logits, predicted);
  JsonWriter json(2);
  json.begin_object().member("texts", file.texts.size()).member("skipped", file.num_skipped);
  for (const auto& [name, value] : metrics_of(file.texts, predicted, classes))
    json.member(name, value);
  json.end_object();
  print_line(json.text());
  return 0;
}

}  // namespace megatron
