// What becomes of the tensors that autograd saves for the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace megatron {

// While it lives, `keep` is asked about each tensor that autograd saves on this thread. It returns
// the function that gives the tensor back, called whenever the backward needs it; empty: the tensor
// itself is kept. Scopes may be nested: the recomputing ones are asked first, from the innermost
// outwards until one keeps the tensor, then the innermost of the others.
class SavedTensorScope {
 public:
  using Restore = std::function<at::Tensor()>;
  using Keep = std::function<Restore(const at::Tensor&)>;

  SavedTensorScope(bool recomputing, Keep keep);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  friend Restore keep_saved(const at::Tensor& tensor);
  const Keep keep_;
  SavedTensorScope** const list_;  // of this kind on this thread; the innermost first
  SavedTensorScope* const outer_;
};

// Keeps a tensor as autograd would if it saved it here: the scopes of this thread are asked.
SavedTensorScope::Restore keep_saved(const at::Tensor& tensor);

// For a scope of one tensor: it is computed again when the backward first asks for it, and shared
// as long as somebody holds it. `compute` must give the same bits, and runs without autograd.
SavedTensorScope::Restore recomputed(std::function<at::Tensor()> compute);

}  // namespace megatron
