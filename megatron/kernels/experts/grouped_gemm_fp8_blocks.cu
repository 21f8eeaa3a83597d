#include "megatron/kernels/detail/grouped_gemm_fp8_sm90.cuh"

namespace megatron {

void run_grouped_fp8_by_blocks(const GroupedGemmFp8& gemm, const Fp8GroupedRun& run) {
  if (gemm.weight_grad) return run_grouped_fp8<Fp8Scaling::kBlocks, true>(gemm, run);
  run_grouped_fp8<Fp8Scaling::kBlocks, false>(gemm, run);
}

}  // namespace megatron
