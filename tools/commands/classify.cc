// megatron classify: classes of texts by a model of `finetune --task classify`, or answers to
// questions by one of `--task multichoice`, and how well they meet the labels of a file.
#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/tuning/multiple_choice.h"
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
            "a .tsv file of GLUE, or JSON lines, {\"text\", \"text_b\" (optional), \"label\"}; "
            "for a multiple-choice head those of RACE, {\"article\", \"questions\", \"options\", "
            "\"answers\"}");
    v.field("labels", labels, "names of the classes, as the file spells them; none: 0, 1, ...");
    v.field("log_samples", log_samples,
            "write logits, prediction and label of every text or question to this .jsonl file");
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

// Of each text or question.
struct ToldRows {
  at::Tensor logits;  // [rows, classes] fp32; numbers: [rows, 1]; choices: [rows, choices]
  std::vector<std::optional<double>> labels;
};

ToldRows tell_classes(const LoadedModel& loaded, const std::vector<LabelledText>& texts,
                      const ClassifyOptions& options) {
  ToldRows rows{classify_texts(*loaded.model, *loaded.tokenizer, texts, options), {}};
  for (const LabelledText& text : texts) rows.labels.push_back(text.label);
  return rows;
}

ToldRows tell_answers(const LoadedModel& loaded, const std::string& path,
                      const ClassifyOptions& options) {
  const int64_t choices = num_choices(loaded.config);
  const std::vector<ChoiceQuestion> questions = read_choice_questions(path, choices);
  ToldRows rows{
      classify_texts(*loaded.model, *loaded.tokenizer, texts_of_choices(questions), options)
          .view({-1, choices}),
      {}};
  for (const ChoiceQuestion& question : questions) rows.labels.emplace_back(question.answer);
  return rows;
}

// Class or number of each row.
std::vector<double> predictions_of(const at::Tensor& logits) {
  const at::Tensor chosen =
      (logits.size(1) == 1 ? logits.squeeze(1) : logits.argmax(1)).to(at::kDouble).contiguous();
  return {chosen.const_data_ptr<double>(), chosen.const_data_ptr<double>() + chosen.numel()};
}

void log_rows(const std::string& path, const ToldRows& told, const std::vector<double>& predicted) {
  std::string lines;
  const auto rows = told.logits.accessor<float, 2>();
  for (size_t i = 0; i < predicted.size(); ++i) {
    JsonWriter json;
    json.begin_object().member("id", i).key("logits").begin_array();
    for (int64_t k = 0; k < told.logits.size(1); ++k)
      json.value(static_cast<double>(rows[static_cast<int64_t>(i)][k]));
    json.end_array().member("prediction", predicted[i]);
    if (told.labels[i]) json.member("label", *told.labels[i]);
    lines += json.end_object().text() + "\n";
  }
  write_file_atomically(path, lines);
}

// `classes`: 1 predicts numbers.
std::vector<NamedMetric> metrics_of(const std::vector<std::optional<double>>& given,
                                    const std::vector<double>& predicted, int64_t classes) {
  std::vector<double> labels;
  for (const std::optional<double>& label : given)
    if (label) labels.push_back(*label);
  if (labels.empty()) return {};  // a file to predict
  MEGATRON_CHECK(labels.size() == given.size(), "some texts have a label and others have none");
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
  const int64_t classes = num_classes(loaded.config), choices = num_choices(loaded.config);
  const int64_t positions = max_positions(loaded.config),
                trained = loaded.config.transformer.seq_length;
  const int64_t usual = positions < 0 ? trained : std::min(positions, trained);
  const ClassifyOptions options{config.max_length.value_or(usual), config.batch_tokens};
  JsonWriter json(2);
  json.begin_object();
  ToldRows told;
  if (choices > 0) {
    told = tell_answers(loaded, config.input, options);
    json.member("questions", told.labels.size());
  } else {
    const LabelledFile file =
        read_labelled_texts(config.input, {std::max<int64_t>(1, classes), config.labels});
    told = tell_classes(loaded, file.texts, options);
    json.member("texts", told.labels.size()).member("skipped", file.num_skipped);
  }
  const std::vector<double> predicted = predictions_of(told.logits);
  if (!config.log_samples.empty()) log_rows(config.log_samples, told, predicted);
  for (const auto& [name, value] :
       metrics_of(told.labels, predicted, choices > 0 ? choices : classes))
    if (choices == 0 || name == "accuracy") json.member(name, value);
  json.end_object();
  print_line(json.text());
  return 0;
}

}  // namespace megatron
