#include "megatron/training/benchmarking/measured_linear.h"

#include <utility>

#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor normal_matrix(int64_t rows, int64_t columns, at::ScalarType type, c10::Device device) {
  return at::randn({rows, columns}, at::dtype(type).device(device));
}

QuantizedTensor codes_of(const at::Tensor& x, OperandRole role,
                         const QuantizationOptions& options) {
  return options.enabled() ? quantize_operand(x, role, options, {}) : QuantizedTensor{};
}

}  // namespace

MeasuredLinear::MeasuredLinear(std::string what, int64_t rows, int64_t n, int64_t k,
                               at::ScalarType type, c10::Device device,
                               const QuantizationOptions& options)
    : name(std::move(what)),
      x(normal_matrix(rows, k, type, device)),
      w(normal_matrix(n, k, type, device).mul_(0.02)),
      dy(normal_matrix(rows, n, type, device)),
      target(at::zeros({n, k}, at::dtype(at::kFloat).device(device))),
      quantization(options),
      x_codes(codes_of(x, OperandRole::kInput, options)),
      w_codes(codes_of(w, OperandRole::kWeight, options)),
      dy_codes(codes_of(dy, OperandRole::kGradient, options)) {}

double MeasuredLinear::flops() const {
  return 2.0 * static_cast<double>(x.size(0)) * static_cast<double>(w.numel());
}

void MeasuredLinear::forward() const {
  const bool fast = quantization.recipe != QuantizationRecipe::kBlockwise;  // as in the layers
  if (quantization.enabled())
    quantized_product(x_codes.rows, w_codes.rows, x.scalar_type(), {}, fast);
  else
    linear_forward(x, w, {});
}

void MeasuredLinear::input_grad() const {
  if (quantization.enabled())
    quantized_product(dy_codes.rows, w_codes.columns, x.scalar_type(), {}, /*fast=*/false);
  else
    linear_input_grad(dy, w, gelu_input);
}

void MeasuredLinear::weight_grad() const {
  if (quantization.enabled() && quantization.weight_gradient)
    quantized_product_into(dy_codes.columns, x_codes.columns, target, 1.0);
  else
    linear_weight_grad(dy, x, target, 1.0);
}

void MeasuredLinear::backward() const {
  input_grad();
  weight_grad();
}

}  // namespace megatron
