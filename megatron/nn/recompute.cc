#include "megatron/nn/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "megatron/tensor/torch.h"

namespace megatron {

struct BackwardRoot::Impl {
  torch::autograd::Edge edge;
};

BackwardRoot::BackwardRoot() = default;
BackwardRoot::BackwardRoot(BackwardRoot&&) noexcept = default;
BackwardRoot& BackwardRoot::operator=(BackwardRoot&&) noexcept = default;
BackwardRoot::~BackwardRoot() = default;

BackwardRoot::BackwardRoot(const at::Tensor& tensor) {
  if (tensor.requires_grad()) impl_ = std::make_unique<Impl>(Impl{torch::autograd::impl::gradient_edge(tensor)});
}

void BackwardRoot::run(const at::Tensor& grad) {
  if (!impl_) return;
  const Impl impl = std::move(*impl_);
  impl_.reset();
  torch::autograd::Engine::get_default_engine().execute({impl.edge}, {grad}, /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, {});
}

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
  backward(BackwardRoot(root), grad.defined() ? grad : at::ones_like(root));
}

void RecomputeTape::backward(BackwardRoot root, const at::Tensor& grad) {
  root.run(grad);
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
