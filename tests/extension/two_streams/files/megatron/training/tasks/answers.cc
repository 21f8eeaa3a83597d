// Answers to given questions: the GPT of every other task, whose labels are a
// stream of their own.
#include <algorithm>

#include "megatron/base/json_writer.h"
#include "megatron/datasets/answer_dataset.h"
#include "megatron/datasets/blend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

TrainValidTestDatasets build(const Arguments& arguments, const DatasetRequest& given) {
  AnswerDatasetConfig config;
  config.sequence_length = given.sequence_length;
  config.seed = given.seed;
  config.pad =
      std::max<int64_t>(0, given.tokenizer.pad >= 0 ? given.tokenizer.pad : given.tokenizer.eod);
  DatasetRequest request = given;
  request.make_member = [=](const MemberRequest& member) {
    const auto file = member.open(member.path);
    const auto [first, last] = split_range(member.bounds, file->num_documents());
    return std::make_shared<const AnswerDataset>(answers_of(file, first, last),
                                                 json_quote(member.path), last - first,
                                                 member.num_samples.value_or(last - first), config);
  };
  request.make_mock = [=](Split split, int64_t num_samples) {
    const int64_t seed = config.seed * kNumSplits + static_cast<int64_t>(split);
    return std::make_shared<const AnswerDataset>(
        mock_answers(seed, given.tokenizer.vocab_size, config.sequence_length), "\"mock\"",
        /*num_pairs=*/97, num_samples, config);
  };
  return build_train_valid_test_datasets(arguments.data, request);
}

// Labels and weights of this rank's positions, from the stream of the answers.
Batch with_labels(const Batch& batch, int64_t sequence_length) {
  const at::Tensor at = batch.place.position - first_answer(sequence_length);
  const at::Tensor index = at.clamp_min(0);
  Batch with = batch;
  with.set("labels", batch["answer"].index_select(1, index));
  with.set("loss_mask", batch["answer_weight"].index_select(1, index) * (at >= 0));
  return with;
}

PretrainTask answers_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  const int64_t s = arguments.transformer.seq_length;
  task.name = "answers";
  task.datasets_provider = build;
  task.forward_step = [s, gpt = task.forward_step](Model& model, const Batch& batch,
                                                   const StageTensors& input,
                                                   const ForwardContext& context) {
    return gpt(model, with_labels(batch, s), input, context);
  };
  task.begin_loss = [s, gpt = task.begin_loss](Model& model, const Batch& batch,
                                               const at::Tensor& hidden) {
    return gpt(model, with_labels(batch, s), hidden);
  };
  return task;
}

}  // namespace

const TaskType& answers_task_type() {
  static const TaskType type = {"answers", answers_task};
  return type;
}

}  // namespace megatron
