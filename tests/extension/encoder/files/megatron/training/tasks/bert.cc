// Pretraining of a BERT: masked tokens, and the order of two halves.
#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/masked_dataset.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

struct MaskConfig : Config {
  double mask_prob = 0.15;

  void fields(FieldVisitor& v) override {
    v.group("bert");
    v.role(FieldRole::kNumerics);
    v.field("mask_prob", mask_prob, "bert: share of the tokens that the model shall find");
  }
  void validate(Violations& violations) const override {
    violations.require(mask_prob > 0 && mask_prob <= 1,
                       cat("--mask-prob ", mask_prob, " is outside (0, 1]"));
  }
};

MaskedDatasetConfig dataset_config(const Arguments& arguments, const DatasetRequest& request) {
  const int64_t v = request.tokenizer.vocab_size;
  MaskedDatasetConfig config{.sequence_length = request.sequence_length,
                             .seed = request.seed,
                             .mask_prob = own_config<MaskConfig>(arguments.own).mask_prob,
                             .vocab_size = v,
                             .cls = v - 3,
                             .sep = v - 2,
                             .mask = v - 1};
  if (arguments.data.mock_data) return config;  // the last ids stand for special ones
  for (const auto& [token, id] : {std::pair{"[CLS]", &config.cls}, std::pair{"[SEP]", &config.sep},
                                  std::pair{"[MASK]", &config.mask}}) {
    const std::optional<int32_t> found = request.text_tokenizer->token_to_id(token);
    MEGATRON_CHECK(found, "--task bert: the tokenizer has no token ", token,
                   "\nhint: --special-tokens adds it");
    *id = *found;
  }
  return config;
}

TrainValidTestDatasets build(const Arguments& arguments, const DatasetRequest& given) {
  const MaskedDatasetConfig config = dataset_config(arguments, given);
  DatasetRequest request = given;
  request.make_member = [=](const MemberRequest& member) {
    const auto file = member.open(member.path);
    const auto [first, last] = split_range(member.bounds, file->num_sequences());
    return std::make_shared<const MaskedDataset>(
        windows_of(file, first, last, config), json_quote(member.path), member.num_samples, config);
  };
  request.make_mock = [=](Split split, int64_t num_samples) {
    MaskedDatasetConfig of_split = config;
    of_split.seed = config.seed * kNumSplits + static_cast<int64_t>(split);
    return std::make_shared<const MaskedDataset>(mock_windows(of_split), "\"mock\"", num_samples,
                                                 of_split);
  };
  return build_train_valid_test_datasets(arguments.data, request);
}

PretrainTask bert_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "bert";
  task.model_provider = provide_model("bert");
  task.datasets_provider = build;
  return task;
}

}  // namespace

const TaskType& bert_task_type() {
  static const TaskType type = {"bert", bert_task, OwnConfig(MaskConfig())};
  return type;
}

}  // namespace megatron
