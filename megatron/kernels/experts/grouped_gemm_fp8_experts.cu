#include "megatron/kernels/detail/grouped_gemm_fp8_sm90.cuh"

namespace megatron {

void run_grouped_fp8_by_experts(const GroupedGemmFp8& gemm, const Fp8GroupedRun& run) {
  if (gemm.weight_grad) return run_grouped_fp8<Fp8Scaling::kTensor, true>(gemm, run);
  if (!gemm.fast) return run_grouped_fp8<Fp8Scaling::kTensor, false>(gemm, run);
  MEGATRON_ASSERT(gemm.a_type == Fp8Type::kE4M3, "a forward product of an E5M2 input");
  GroupedFp8Kernel<Fp8Type::kE4M3, Fp8Scaling::kTensorFast, false>::run(run);
}

}  // namespace megatron
