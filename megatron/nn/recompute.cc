#include "megatron/nn/recompute.h"

#include <torch/csrc/autograd/autograd.h>

#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor RecomputeTape::run(const Body& body, const at::Tensor& x) {
  if (!at::GradMode::is_enabled()) return body(x);
  at::Tensor output;
  {
    const at::NoGradGuard no_grad;
    output = body(x.detach());
  }
  output = output.detach().set_requires_grad(true);
  cuts_.push_back({body, x, output});
  return output;
}

void RecomputeTape::backward(const at::Tensor& root, const at::Tensor& grad) {
  torch::autograd::backward({root}, {grad});
  while (!cuts_.empty()) {
    Cut cut = std::move(cuts_.back());
    cuts_.pop_back();
    const at::Tensor output_grad = cut.output.grad();
    cut.output.mutable_grad().reset();
    if (!output_grad.defined()) continue;  // nothing below this cut reached the root
    const at::Tensor input = cut.input.detach().set_requires_grad(true);
    torch::autograd::backward({cut.body(input)}, {output_grad});
    if (!cut.input.requires_grad() || !input.grad().defined()) continue;
    torch::autograd::backward({cut.input}, {input.grad()});
  }
}

}  // namespace megatron
