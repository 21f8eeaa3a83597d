// Activation recomputation by cutting the graph explicitly: no backward runs inside another one.
//
// A tape belongs to one pass over one model chunk. run() executes a body without autograd, and the
// graph ends at its output. backward() starts at the root and walks the cuts in reverse: it runs
// each body again with autograd on, runs its backward, and continues below its input. Between
// forward and backward a cut keeps only its input.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace megatron {

// The roots of a backward without the memory of their tensors: a pipeline stage frees an activation
// once it is sent.
class BackwardRoot {
 public:
  BackwardRoot();
  explicit BackwardRoot(at::TensorList tensors);
  BackwardRoot(BackwardRoot&&) noexcept;
  BackwardRoot& operator=(BackwardRoot&&) noexcept;
  ~BackwardRoot();
  bool defined() const { return impl_ != nullptr; }
  // Adds a root with its gradient. No-op if it needs none.
  void add(const at::Tensor& tensor, const at::Tensor& grad);
  // Adds the roots of `more`, which were added with their gradients.
  void join(BackwardRoot more);
  // Runs one backward with the gradients of the tensors and frees the graph. Sets grad() of the
  // leaves. Gradients of tensors that need none are ignored.
  void run(at::TensorList grads);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The end of a backward: catches the gradient of a tensor, and adds up those of several backwards.
// Unlike a leaf it does not keep the tensor alive.
class BackwardEnd {
 public:
  BackwardEnd();
  // Attaches this end to the tensor, which must have no graph; it requires a gradient afterwards.
  explicit BackwardEnd(at::Tensor& tensor);
  BackwardEnd(BackwardEnd&&) noexcept;
  BackwardEnd& operator=(BackwardEnd&&) noexcept;
  ~BackwardEnd();
  bool defined() const { return node_ != nullptr; }
  // Moves the gradient out; undefined if no backward reached the tensor.
  at::Tensor take_grad();

 private:
  struct Node;
  std::shared_ptr<Node> node_;
};

class RecomputeTape {
 public:
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  // How an input is kept until the backward: called with the input in the forward; the function
  // that it returns is called once, in the backward, and returns the input.
  using Keeper = std::function<std::function<at::Tensor()>(const at::Tensor&)>;

  // y = body(x); body must be a pure function of x, of parameters and of token positions. x and y
  // are floating tensors. Without a keeper x itself is kept.
  at::Tensor run(const Body& body, const at::Tensor& x, const Keeper& keeper = {});

  // x, for bodies that read it besides their input: the gradients of all that is computed from the
  // result are added up, and reach x in one backward after those of the bodies that follow.
  at::Tensor share(const at::Tensor& x);

  // compute(), but of a body that runs again the value of its first run: for what must not be
  // computed twice, such as choices that a rounding may change, counts, and sums over ranks. The
  // value is kept with the cut until the backward; no gradient flows through it. A body makes the
  // same calls in the same order each time it runs.
  at::Tensor once(const std::function<at::Tensor()>& compute);

  // Adds a root of the backward with its gradient, a scalar that is computed beside the output:
  // inside a body that runs again for the backward it is run with the body's output, elsewhere with
  // the root of the whole backward. No-op if it needs no gradient, as inside a body that runs
  // without autograd.
  void add_root(const at::Tensor& root, const at::Tensor& grad);
  // Whether a body is running again.
  bool runs_again() const { return runs_again_; }

  // Backward from `root` with the gradient `grad` (undefined: 1, for a scalar). Consumes the tape.
  void backward(const at::Tensor& root, const at::Tensor& grad = {});
  void backward(BackwardRoot root, at::TensorList grads);

 private:
  using Values = std::vector<at::Tensor>;
  struct Cut {
    Body body;  // null: of share()
    std::function<at::Tensor()> input;
    BackwardRoot below;  // root of the backward below the input
    BackwardEnd output;
    Values once;  // what once() returned, in order
  };
  at::Tensor backward(Cut& cut);
  std::vector<Cut> cuts_;
  BackwardRoot added_;  // by add_root() since the last backward
  bool runs_again_ = false;
  Values* kept_ = nullptr;  // of the body that runs for the first time: once() adds to it
  Values again_;            // of the body that runs again: once() takes from it
  size_t next_again_ = 0;
};

// tape->once(compute); without a tape compute(), of which no graph is recorded.
at::Tensor computed_once(RecomputeTape* tape, const std::function<at::Tensor()>& compute);

}  // namespace megatron
