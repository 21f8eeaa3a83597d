// The products of a linear layer on random numbers, for measurements.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/tensor/quantization.h"

namespace megatron {

// y [rows, n] = x [rows, k] w^T, with quantised operands if the layer's are.
struct MeasuredLinear {
  std::string name;
  at::Tensor x, w, dy, target;
  at::Tensor gelu_input;  // input of the GELU that gives x; undefined: none
  QuantizationOptions quantization;
  QuantizedTensor x_codes, w_codes, dy_codes;

  MeasuredLinear(std::string what, int64_t rows, int64_t n, int64_t k, at::ScalarType type,
                 c10::Device device, const QuantizationOptions& options = {});
  double flops() const;
  void forward() const;
  void input_grad() const;
  void weight_grad() const;
  void backward() const;
};

}  // namespace megatron
