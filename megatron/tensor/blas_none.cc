#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/gemm.h"

namespace megatron {

bool blas_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return false;
}
bool blas_input_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&) { return false; }
bool blas_wide_weight_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) {
  return false;
}
void use_wide_blas_reductions() {}
void tune_gemms(const std::string&) {}

}  // namespace megatron
