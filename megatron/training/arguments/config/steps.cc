#include "megatron/training/arguments/config/steps.h"

#include "megatron/base/value_checks.h"

namespace megatron {

void StepsConfig::fields(FieldVisitor& v) {
  v.group("training");
  v.role(FieldRole::kNumerics);
  v.field("task", task,
          "what is trained on: gpt (text), sft (conversations) or dpo (pairs of responses)");
  v.field("micro_batch_size", micro_batch_size,
          "samples per rank and pass; memory grows with it (required)");
  v.field(
      "global_batch_size", global_batch_size,
      "samples per iteration over all ranks; default: micro batch size times data-parallel size");
  v.role(FieldRole::kRun);
  v.field("step_batch_size_schedule", step_batch_size_schedule,
          "batch sizes that grow: \"0:32 10B:64\" is 64 samples from 10 billion tokens on");
  v.field("decrease_batch_size_if_needed", decrease_batch_size_if_needed,
          "round the global batch size down to what micro batches and ranks divide");
  v.field("train_iters", train_iters, "iterations of the whole run");
  v.field("train_samples", train_samples, "samples of the whole run, in place of --train-iters");
  v.role(FieldRole::kNumerics);
  v.field({"calculate_per_token_loss", "--no-calculate-per-token-loss", true},
          calculate_per_token_loss,
          "average the means of the micro-batches, as Megatron-LM does, in place of all tokens of "
          "the global batch");
  v.role(FieldRole::kRun);
  v.field("skip_train", skip_train, "evaluate only");
  v.field(
      "check_weight_hash_across_dp_replicas_interval",
      check_weight_hash_across_dp_replicas_interval,
      "iterations between comparisons, by hashes, of the weights, master weights and moments that "
      "several ranks hold; a difference names the rank and ends the run; 0: never; default: 100");
}

void StepsConfig::validate(Violations& v) const {
  v.require(micro_batch_size > 0, cat("--micro-batch-size is ", micro_batch_size),
            "give how many samples a rank takes per pass, at least 1");
  at_least(v, "--global-batch-size", global_batch_size, 1);
  at_least(v, "--train-iters", train_iters, 0);
  at_least(v, "--check-weight-hash-across-dp-replicas-interval",
           check_weight_hash_across_dp_replicas_interval, 0);
  at_least(v, "--train-samples", train_samples, 0);
}

}  // namespace megatron
