// Fine-tuning of an encoder to tell classes of texts, or a number, from the pooled first token.
#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/labelled_sets.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

struct ClassifyConfig : Config {
  std::vector<std::string> labels;

  void fields(FieldVisitor& v) override {
    v.role(FieldRole::kNumerics);
    v.group("classification");
    v.field("labels", labels,
            "classify: names of the classes, as the data spells them; none: 0, 1, ..., and the "
            "names of MNLI");
  }
};

TrainValidTestDatasets make_labelled_datasets(const Arguments& arguments,
                                              const DatasetRequest& request) {
  const LabelOptions options{own_config<BertConfig>(arguments.own).bert_classes,
                             own_config<ClassifyConfig>(arguments.own).labels};
  LabelledSource source;
  source.read = [&](const std::string& path) {
    const LabelledFile file = read_labelled_texts(path, options);
    if (file.num_skipped > 0)
      log_warning(cat(path, ": ", file.num_skipped,
                      " rows are skipped: of another width, or with an empty text"));
    return encode_file(path, file.texts, request);
  };
  source.mock = [&](Split split, int64_t num_samples) {
    return mock_labelled(request, split, num_samples, options.classes);
  };
  source.describe = [&](JsonWriter& json) {
    json.member("labels", options.labels).member("classes", options.classes);
  };
  return build_labelled_sets(arguments, request, source);
}

// Cross entropy of the class, or the squared error of the number; with several classes the metric
// is how many samples got theirs.
StageOutput classify_step(Model& model, const Batch& batch, const StageTensors& input,
                          const ForwardContext& context) {
  StageTensors hidden = model.hidden(batch, input, context);
  if (!model.slice().head) return {std::move(hidden), {}, {}};
  const at::Tensor raw = dynamic_cast<BertModel&>(model).class_logits(
      hidden.front(), batch.find("padding_mask"), &context, batch.rows_of("padding_mask").get());
  const at::Tensor logits =
      raw.to(raw.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);  // [b, classes]
  const at::Tensor target = batch["target"], weight = batch["sample_weight"].to(logits.dtype());
  if (logits.size(1) == 1)
    return {{}, {((logits - target).square() * weight).sum(), weight.sum()}, {}};
  const at::Tensor classes = target.to(at::kLong);
  const at::Tensor losses = -logits.log_softmax(1).gather(1, classes);
  const at::Tensor hits = logits.detach().argmax(1, /*keepdim=*/true) == classes;
  return {
      {}, {(losses * weight).sum(), weight.sum()}, (hits * weight).sum(at::kDouble).reshape({1})};
}

PretrainTask classify_task(const Arguments& arguments) {
  const auto& own = own_config<BertConfig>(arguments.own);
  if (own.bert_classes == 0)
    throw UsageError(
        "--task classify needs --bert-classes\nhint: the number of classes, or 1 to predict a "
        "number");
  const std::vector<std::string>& labels = own_config<ClassifyConfig>(arguments.own).labels;
  if (!labels.empty() && std::ssize(labels) != own.bert_classes)
    throw UsageError(
        cat("--labels names ", labels.size(), " classes, --bert-classes is ", own.bert_classes));
  if (arguments.parallel.sequence_parallel || arguments.parallel.context_parallel_size > 1)
    throw UsageError(
        "--task classify with --sequence-parallel or --context-parallel-size is not built");
  PretrainTask task = gpt_task(arguments);
  task.name = "classify";
  task.loss_name = own.bert_classes == 1 ? "squared error" : "classification loss";
  task.loss_per_token = false;
  task.model_provider = provide_model("bert");
  task.datasets_provider = make_labelled_datasets;
  task.forward_step = classify_step;
  if (own.bert_classes > 1) task.metrics = {"accuracy"};
  task.flops_per_token = [provider = task.model_provider](const Arguments& a,
                                                          const Vocabulary& vocabulary) {
    return model_flops_per_token(provider, a, vocabulary);
  };
  return task;
}

}  // namespace

const TaskType& classify_task_type() {
  static const TaskType type = {"classify", classify_task, OwnConfig(ClassifyConfig())};
  return type;
}

}  // namespace megatron
