#include "megatron/training/arguments/batch_invariant_rules.h"

#include "megatron/transformer/config/batch_invariant.h"

namespace megatron {

void validate_served_bits(const Arguments& a, Violations& v) {
  if (!a.transformer.batch_invariant_mode) return;
  validate_batch_invariant(a.transformer, v);
  const DeviceChoice device = a.training.device;
  v.require(device == DeviceChoice::kAuto || device == DeviceChoice::kCpu,
            "--batch-invariant-mode is not built for GPUs yet", "--device cpu");
  v.require(!a.optimizer.bf16 && !a.optimizer.fp16,
            "--batch-invariant-mode computes in fp32 on a CPU", "leave --bf16 and --fp16 out");
  v.require(a.transformer.attention_dropout == 0.0 && a.transformer.hidden_dropout == 0.0,
            "--batch-invariant-mode cannot be used with dropout, which no server has",
            "--attention-dropout 0 --hidden-dropout 0");
  v.require(a.parallel.context_parallel_size == 1,
            "--batch-invariant-mode with --context-parallel-size above 1 is not built");
}

}  // namespace megatron
