// Recomputation by explicit cuts of the graph: no backward runs inside another one.
//
// A tape belongs to one pass over one model chunk. run() executes a body without recording it, and
// the graph ends at its output. backward() starts at the root and walks the cuts in reverse: it
// runs each body again with recording on, goes back through it, and continues below its input.
// Between the two a cut holds its input and nothing else.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace megatron {

// Where a backward starts, without the memory of the tensor it was made from: a pipeline stage
// drops an activation once it is sent.
class BackwardRoot {
 public:
  BackwardRoot();
  explicit BackwardRoot(const at::Tensor& tensor);
  BackwardRoot(BackwardRoot&&) noexcept;
  BackwardRoot& operator=(BackwardRoot&&) noexcept;
  ~BackwardRoot();
  bool defined() const { return impl_ != nullptr; }
  // Runs the backward with the gradient of the tensor and frees the graph. Leaves get their grad().
  void run(const at::Tensor& grad);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class RecomputeTape {
 public:
  using Body = std::function<at::Tensor(const at::Tensor&)>;

  RecomputeTape();
  RecomputeTape(RecomputeTape&&) noexcept;
  RecomputeTape& operator=(RecomputeTape&&) noexcept;
  ~RecomputeTape();

  // y = body(x); body must be a pure function of x, of parameters and of places. x and y are
  // floating tensors.
  at::Tensor run(const Body& body, const at::Tensor& x);

  // Backward from `root` with the gradient `grad` (undefined: 1, for a scalar). Consumes the tape.
  void backward(const at::Tensor& root, const at::Tensor& grad = {});
  void backward(BackwardRoot root, const at::Tensor& grad);

 private:
  struct CutNode;
  struct Cut {
    Body body;
    at::Tensor input;
    BackwardRoot below;  // of the input
    std::shared_ptr<CutNode> node;
  };
  static at::Tensor backward(Cut& cut);
  std::vector<Cut> cuts_;
};

}  // namespace megatron
