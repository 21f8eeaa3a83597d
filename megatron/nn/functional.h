// Helpers that the layers' autograd functions share.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "megatron/nn/parameter.h"

namespace megatron {

// An empty leaf that requires a gradient. Passing it to an autograd function makes autograd record
// the function even if no other input requires a gradient (an embedding has only indices); its own
// gradient is never computed.
at::Tensor anchor();

// A parameter as an ordinary differentiable tensor, for code that composes ATen operations: its
// gradient is added to the parameter's target when the backward reaches it. The store's value is in
// use until then; without autograd, or frozen, no longer than the call. `type`: of the tensor and
// of its gradient; none: that of the value.
at::Tensor differentiable(Parameter& parameter, std::optional<at::ScalarType> type = {});

// Computes a weight gradient and reports it ready: now, or later as a separate action of a
// zero-bubble schedule. `accumulate` adds to the target it is given.
void run_weight_gradient(Parameter& weight, std::function<void(const GradTarget&)> accumulate);

// What the forward saved for the backward of a layer with this weight. Where its weight gradients
// are deferred, which keeps some of it for longer, without the graph behind it: that would be kept,
// too, with all that its functions hold, masks of attention among it.
std::vector<at::Tensor> saved_for(const Parameter& weight, std::vector<at::Tensor> saved);

// The value during one pass; released when the scope ends. `parameter` may be null: value() is then
// undefined.
class AcquiredValue {
 public:
  explicit AcquiredValue(Parameter* parameter);
  ~AcquiredValue();
  AcquiredValue(const AcquiredValue&) = delete;
  AcquiredValue& operator=(const AcquiredValue&) = delete;
  const at::Tensor& value() const { return value_; }

 private:
  Parameter* parameter_;
  at::Tensor value_;
};

}  // namespace megatron
