#include "megatron/nn/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

using torch::autograd::variable_list;

struct BackwardRoot::Impl {
  torch::autograd::edge_list edges;
  std::vector<size_t> places;  // of the edges' tensors in the list
  // Roots with their gradients
  torch::autograd::edge_list added;
  variable_list gradients;
};

BackwardRoot::BackwardRoot() = default;
BackwardRoot::BackwardRoot(BackwardRoot&&) noexcept = default;
BackwardRoot& BackwardRoot::operator=(BackwardRoot&&) noexcept = default;
BackwardRoot::~BackwardRoot() = default;

BackwardRoot::BackwardRoot(at::TensorList tensors) {
  Impl impl;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].requires_grad()) continue;
    impl.edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
    impl.places.push_back(i);
  }
  if (!impl.edges.empty()) impl_ = std::make_unique<Impl>(std::move(impl));
}

void BackwardRoot::add(const at::Tensor& tensor, const at::Tensor& grad) {
  if (!tensor.requires_grad()) return;
  if (!impl_) impl_ = std::make_unique<Impl>();
  impl_->added.push_back(torch::autograd::impl::gradient_edge(tensor));
  impl_->gradients.push_back(grad);
}

void BackwardRoot::join(BackwardRoot more) {
  if (!more.impl_) return;
  MEGATRON_ASSERT(more.impl_->edges.empty(), "roots whose gradients are not known");
  if (!impl_) impl_ = std::make_unique<Impl>();
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  append(impl_->added, more.impl_->added);
  append(impl_->gradients, more.impl_->gradients);
}

void BackwardRoot::run(at::TensorList grads) {
  if (!impl_) return;
  Impl impl = std::move(*impl_);
  impl_.reset();
  variable_list own;
  for (const size_t place : impl.places) own.push_back(grads[place]);
  impl.edges.insert(impl.edges.end(), impl.added.begin(), impl.added.end());
  own.insert(own.end(), impl.gradients.begin(), impl.gradients.end());
  torch::autograd::Engine::get_default_engine().execute(impl.edges, own, /*keep_graph=*/false,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, {});
}

struct BackwardEnd::Node final : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {};
    gradient = gradient.defined() ? gradient + grads[0] : std::move(grads[0]);
    return {};
  }
  at::Tensor gradient;
};

BackwardEnd::BackwardEnd() = default;
BackwardEnd::BackwardEnd(BackwardEnd&&) noexcept = default;
BackwardEnd& BackwardEnd::operator=(BackwardEnd&&) noexcept = default;
BackwardEnd::~BackwardEnd() = default;

BackwardEnd::BackwardEnd(at::Tensor& tensor) : node_(new Node, torch::autograd::deleteNode) {
  torch::autograd::create_gradient_edge(tensor, node_);
}

at::Tensor BackwardEnd::take_grad() { return std::move(node_->gradient); }

at::Tensor RecomputeTape::run(const Body& body, const at::Tensor& x, const Keeper& keeper) {
  if (!at::GradMode::is_enabled()) return body(x);
  const at::Tensor input = x.detach();
  at::Tensor output;
  Values values;
  {
    const at::NoGradGuard no_grad;
    kept_ = &values;
    output = body(input).detach();
    kept_ = nullptr;
  }
  BackwardEnd end(output);
  cuts_.push_back({body, keeper ? keeper(input) : [input] { return input; }, BackwardRoot(x),
                   std::move(end), std::move(values)});
  return output;
}

at::Tensor RecomputeTape::share(const at::Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return x;
  at::Tensor output = x.detach();
  BackwardEnd end(output);
  cuts_.push_back({.below = BackwardRoot(x), .output = std::move(end)});
  return output;
}

at::Tensor RecomputeTape::once(const std::function<at::Tensor()>& compute) {
  if (runs_again_) {
    MEGATRON_ASSERT(next_again_ < again_.size(), "a body made more calls when it ran again");
    return again_[next_again_++];
  }
  const at::NoGradGuard no_grad;
  const at::Tensor value = compute().detach();
  if (kept_ != nullptr) kept_->push_back(value);
  return value;
}

at::Tensor computed_once(RecomputeTape* tape, const std::function<at::Tensor()>& compute) {
  if (tape != nullptr) return tape->once(compute);
  const at::NoGradGuard no_grad;
  return compute();
}

void RecomputeTape::add_root(const at::Tensor& root, const at::Tensor& grad) {
  added_.add(root, grad);
}

void RecomputeTape::backward(const at::Tensor& root, const at::Tensor& grad) {
  backward(BackwardRoot(root), grad.defined() ? grad : at::ones_like(root));
}

void RecomputeTape::backward(BackwardRoot root, at::TensorList grads) {
  root.join(std::move(added_));
  root.run(grads);
  while (!cuts_.empty()) {
    Cut cut = std::move(cuts_.back());
    cuts_.pop_back();
    const at::Tensor input_grad = backward(cut);
    cut.body = nullptr;
    cut.input = nullptr;
    if (input_grad.defined()) cut.below.run(input_grad);
  }
}

// Returns the gradient of the input; undefined if none is needed.
at::Tensor RecomputeTape::backward(Cut& cut) {
  const at::Tensor grad = cut.output.take_grad();
  if (!grad.defined()) return {};  // the root does not depend on this cut
  if (!cut.body) return grad;
  const at::Tensor input = cut.input().detach().set_requires_grad(true);
  cut.input = nullptr;
  runs_again_ = true;
  again_ = std::move(cut.once);
  next_again_ = 0;
  BackwardRoot output(cut.body(input));  // drops the tensor itself
  MEGATRON_ASSERT(next_again_ == again_.size(), "a body made fewer calls when it ran again");
  again_.clear();
  runs_again_ = false;
  output.join(std::move(added_));
  output.run(grad);
  // Deferred weight gradients may keep the input alive, but should not keep its gradient.
  return std::move(input.mutable_grad());
}

}  // namespace megatron
