#include "megatron/base/check.h"
#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/gemm.h"

namespace megatron {

bool blas_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const at::Tensor&) {
  return false;
}
bool blas_input_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return false;
}
bool blas_wide_weight_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) {
  return false;
}
void blas_quantized(const QuantizedMatrix&, const QuantizedMatrix&, const at::Tensor&,
                    const at::Tensor&, const at::Tensor&, double, bool) {
  throw_error(
      "a quantised product on a GPU, but this build has no CUDA\nhint: configure with "
      "-DMEGATRON_CUDA=ON");
}
bool scales_rows_of_products(int) { return false; }
void use_wide_blas_reductions() {}
void tune_gemms(const std::string&) {}
int64_t gemm_choices() { return 0; }

}  // namespace megatron
