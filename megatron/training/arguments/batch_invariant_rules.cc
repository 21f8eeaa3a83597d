#include "megatron/training/arguments/batch_invariant_rules.h"

#include "megatron/transformer/config/batch_invariant.h"

namespace megatron {

void validate_served_bits(const Arguments& a, Violations& v) {
  if (!a.transformer.batch_invariant_mode) return;
  validate_batch_invariant(a.transformer, v);
  const DeviceChoice device = a.training.device;
  const bool half = a.optimizer.bf16 || a.optimizer.fp16;
  v.require(!half || device != DeviceChoice::kCpu,
            "--batch-invariant-mode computes in fp32 on a CPU", "leave --bf16 and --fp16 out");
  v.require(half || !a.transformer.is_quantized(),
            "--batch-invariant-mode with FP8 products is built for GPUs alone, in bf16",
            "--bf16 --device cuda, or leave --fp8-format out");
  v.require(half || device != DeviceChoice::kCuda,
            "--batch-invariant-mode computes in bf16 or fp16 on GPUs", "--bf16, or --device cpu");
  if (half)
    validate_batch_invariant_on_gpu(a.transformer, a.parallel.tensor_model_parallel_size, v);
  v.require(a.transformer.attention_dropout == 0.0 && a.transformer.hidden_dropout == 0.0,
            "--batch-invariant-mode cannot be used with dropout, which no server has",
            "--attention-dropout 0 --hidden-dropout 0");
  v.require(a.parallel.context_parallel_size == 1,
            "--batch-invariant-mode with --context-parallel-size above 1 is not built");
}

}  // namespace megatron
