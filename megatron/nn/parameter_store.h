// The simplest owner of parameters: one tensor each. For inference, tools and tests of layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "megatron/nn/module.h"

namespace megatron {

class PlainParameterStore final : public ParameterStore {
 public:
  // Allocates the values (zeros) of every parameter of `module`, which must outlive the store, and
  // attaches itself. With `gradients`, also allocates fp32 (fp64) gradients.
  PlainParameterStore(Module& module, at::ScalarType dtype, at::Device device, bool gradients);

  at::Tensor acquire(Parameter& parameter) override { return parameter.value; }
  void release(Parameter&) override {}
  GradTarget grad_target(Parameter& parameter) override;
  void grad_ready(Parameter&) override {}

  const at::Tensor& grad(const Parameter& parameter) const;
  void zero_grad();

 private:
  std::unordered_map<const Parameter*, at::Tensor> grads_;
};

}  // namespace megatron
