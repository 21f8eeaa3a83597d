// Fine-tuning of an encoder to tell classes of texts, or a number, from the pooled first token.
#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/tuning/labelled_texts.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/tensor/torch.h"
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

class LabelledSets {
 public:
  LabelledSets(const Arguments& arguments, const DatasetRequest& request)
      : data_(arguments.data), request_(request) {
    options_.classes = own_config<BertConfig>(arguments.own).bert_classes;
    options_.labels = own_config<ClassifyConfig>(arguments.own).labels;
  }

  TrainValidTestDatasets build() {
    TrainValidTestDatasets sets;
    const SplitTargets& targets = request_.targets;
    if (!data_.data_path.empty()) {
      const std::vector<LabelledTokens> all = read(data_.data_path);
      const SplitMatrix split = parse_split(data_.split.empty() ? "969, 30, 1" : data_.split);
      const auto part = [&](Split which, std::optional<int64_t> target) {
        const auto& bounds = split[static_cast<size_t>(which)];
        std::pair<int64_t, int64_t> range;
        if (bounds) range = split_range(*bounds, std::ssize(all));
        return make({all.begin() + range.first, all.begin() + range.second}, data_.data_path,
                    target);
      };
      sets.train = part(Split::kTrain, targets.train);
      add_valid(part(Split::kValid, targets.valid), sets);
      sets.test = part(Split::kTest, targets.test);
      return sets;
    }
    sets.train = make(read(data_.train_data_path), data_.train_data_path, targets.train);
    add_valid(make(read(data_.valid_data_path), data_.valid_data_path, targets.valid), sets);
    sets.test = make(read(data_.test_data_path), data_.test_data_path, targets.test);
    return sets;
  }

  std::shared_ptr<const Dataset> mock(Split split, int64_t num_samples) const {
    return make(mock_labelled(request_, split, num_samples, options_.classes), {}, num_samples);
  }

 private:
  static void add_valid(std::shared_ptr<const Dataset> set, TrainValidTestDatasets& sets) {
    if (!set) return;
    sets.valid.push_back(std::move(set));
    sets.valid_names.emplace_back();
  }

  std::vector<LabelledTokens> read(const std::vector<std::string>& files) const {
    std::vector<LabelledTokens> all;
    for (const std::string& path : files) {
      const LabelledFile file = read_labelled_texts(path, options_);
      if (file.num_skipped > 0)
        log_warning(cat(path, ": ", file.num_skipped,
                        " rows are skipped: of another width, or with an empty text"));
      try {
        for (LabelledTokens& row :
             encode_labelled(*request_.text_tokenizer, file.texts, request_.sequence_length))
          all.push_back(std::move(row));
      } catch (const Error& error) {
        throw Error(cat(path, ": ", error.what()));
      }
    }
    return all;
  }

  std::shared_ptr<const Dataset> make(std::vector<LabelledTokens> rows,
                                      const std::vector<std::string>& files,
                                      std::optional<int64_t> target) const {
    if (rows.empty() || target == 0) return nullptr;
    LabelledDatasetConfig config = labelled_dataset_config(request_);
    JsonWriter source;
    source.begin_object()
        .member("files", files)
        .member("labels", options_.labels)
        .member("classes", options_.classes)
        .member("tokenizer", request_.tokenizer.identity.fingerprint)
        .end_object();
    config.description = source.text();
    return std::make_shared<LabelledTextDataset>(std::move(rows), target.value_or(0),
                                                 std::move(config));
  }

  const DataConfig& data_;
  const DatasetRequest& request_;
  LabelOptions options_;
};

TrainValidTestDatasets make_labelled_datasets(const Arguments& arguments,
                                              const DatasetRequest& given) {
  LabelledSets sets(arguments, given);
  if (!arguments.data.mock_data) return sets.build();
  DatasetRequest request = given;
  request.make_mock = [&](Split split, int64_t num_samples) {
    return sets.mock(split, num_samples);
  };
  return build_train_valid_test_datasets(arguments.data, request);
}

// Cross entropy of the class, or the squared error of the number; with several classes the metric
// is how many samples got theirs.
StageOutput classify_step(Model& model, const Batch& batch, const StageTensors& input,
                          const ForwardContext& context) {
  StageTensors hidden = model.hidden(batch, input, context);
  if (!model.slice().head) return {std::move(hidden), {}, {}};
  const at::Tensor raw = dynamic_cast<BertModel&>(model).class_logits(hidden.front(), &context);
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
