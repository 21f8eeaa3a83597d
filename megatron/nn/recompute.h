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

// Where a backward ends: catches the gradient that arrives for a tensor. Unlike a leaf it does not
// keep the tensor.
class BackwardEnd {
 public:
  BackwardEnd();
  // Gives the tensor, which has no graph, this end; it requires a gradient afterwards.
  explicit BackwardEnd(at::Tensor& tensor);
  BackwardEnd(BackwardEnd&&) noexcept;
  BackwardEnd& operator=(BackwardEnd&&) noexcept;
  ~BackwardEnd();
  bool defined() const { return node_ != nullptr; }
  // The gradient, once; undefined where no backward arrived.
  at::Tensor take_grad();

 private:
  struct Node;
  std::shared_ptr<Node> node_;
};

class RecomputeTape {
 public:
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  // How an input is kept until the backward: called with the input in the forward; what it returns
  // is called once, in the backward, and gives the input back.
  using Keeper = std::function<std::function<at::Tensor()>(const at::Tensor&)>;

  // y = body(x); body must be a pure function of x, of parameters and of places. x and y are
  // floating tensors. Without a keeper x itself is kept.
  at::Tensor run(const Body& body, const at::Tensor& x, const Keeper& keeper = {});

  // Backward from `root` with the gradient `grad` (undefined: 1, for a scalar). Consumes the tape.
  void backward(const at::Tensor& root, const at::Tensor& grad = {});
  void backward(BackwardRoot root, const at::Tensor& grad);

 private:
  struct Cut {
    Body body;
    std::function<at::Tensor()> input;
    BackwardRoot below;  // of the input
    BackwardEnd output;
  };
  static at::Tensor backward(Cut& cut);
  std::vector<Cut> cuts_;
};

}  // namespace megatron
