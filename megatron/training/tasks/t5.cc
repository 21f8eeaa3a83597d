// Pretraining of a T5: masked spans of a text, from what is left of it.
#include "megatron/datasets/masked/masked_datasets.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/training/arguments/t5_rules.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

PretrainTask t5_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "t5";
  task.model_provider = provide_model("t5");
  task.datasets_provider = [](const Arguments& a, const DatasetRequest& request) {
    const int64_t length = own_config<T5Config>(a.own).decoder_seq_length;
    return build_masked_datasets({.kind = MaskedKind::kT5, .decoder_seq_length = length}, a.data,
                                 a.masked, request);
  };
  task.flops_per_token = [provide = task.model_provider](const Arguments& a,
                                                         const Vocabulary& vocabulary) {
    return model_flops_per_token(provide, a, vocabulary);
  };
  return task;
}

}  // namespace

const TaskType& t5_task_type() {
  static const TaskType type = {.name = "t5",
                                .make = t5_task,
                                .finalize = finalize_t5,
                                .validate = validate_t5,
                                .shrink = shrink_t5};
  return type;
}

}  // namespace megatron
