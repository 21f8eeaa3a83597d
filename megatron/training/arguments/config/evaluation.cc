#include "megatron/training/arguments/config/evaluation.h"

#include "megatron/base/value_checks.h"

namespace megatron {

void EvaluationConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("validation");
  v.field("eval_iters", eval_iters, "global batches of one evaluation; 0: no evaluation");
  v.field("eval_interval", eval_interval,
          "iterations between evaluations; default: only after training");
  v.field("start_eval_at_iter", start_eval_at_iter, "no evaluation before this iteration");
  v.field("eval_global_batch_size", eval_global_batch_size, "default: --global-batch-size");
  v.field("eval_micro_batch_size", eval_micro_batch_size, "default: --micro-batch-size");
}

void EvaluationConfig::validate(Violations& v) const {
  at_least(v, "--eval-iters", eval_iters, 0);
  at_least(v, "--eval-interval", eval_interval, 1);
  at_least(v, "--eval-global-batch-size", eval_global_batch_size, 1);
  at_least(v, "--eval-micro-batch-size", eval_micro_batch_size, 1);
}

}  // namespace megatron
