// Owner of weights that are used by forwards alone, of models that are served: they are exchanged
// in place, and wait in host memory. Of a quantised weight only the quantised copy is kept on the
// device, made from the value in host memory when the weight is first used.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

#include "megatron/nn/module.h"
#include "megatron/tensor/decoding/int8_weight.h"

namespace megatron {

struct ParallelGroups;

// Whether only its quantised copy is kept on the device.
bool holds_quantized_alone(const Parameter& parameter);

// Whether products with it are in 8 bits where a store is told so: of linear layers and the output
// layer, whose table is kept as it is, too, if it is an embedding's.
bool is_int8_weight(const Parameter& parameter);
// Bytes of it in a store that holds weights in 8 bits; `element`: bytes of an element of its value;
// `has_head`: the output layer is on this stage.
int64_t int8_store_bytes(const Parameter& parameter, int64_t element, bool has_head);

// What products with the weight of a linear layer read: its value or its quantised copy, where it
// stays on a device until all weights are exchanged. Undefined: it does not.
at::Tensor weight_at_rest(Module& linear);

// Values are written in host memory first (by a checkpoint), then place() moves them. No forward
// may run during a call.
class ForwardParameterStore final : public ParameterStore {
 public:
  // Allocates zeros for every parameter of `module` in host memory, and attaches itself. `module`
  // must outlive the store's use.
  ForwardParameterStore(Module& module, at::ScalarType dtype, at::Device device);

  // Linear layers multiply in 8 bits from now on. On CPUs.
  void use_int8() { int8_ = true; }
  // The weight in 8 bits, made from its value when it is first asked for; the value is freed unless
  // it is an embedding's table. Null: products are with the value. Not safe among threads.
  const Int8Weight* int8_weight(Parameter& weight);

  // Moves parameters and state to the device, but for values of which a quantised copy will be
  // made.
  void place();
  // The same with values as training begins with (nn/placement.h), which are drawn on the device;
  // those of which a quantised copy is made when it is. `groups` must outlive the store.
  void place_drawn(int64_t seed, const ParallelGroups& groups);
  // Other values, in host memory: of parameters in the order of Module::visit, then of state in
  // that of visit_state. They are copied into the current ones where these are on the device.
  void exchange(const std::vector<at::Tensor>& values);
  // Frees the memory of weights on the device. The result is what restore() takes back: the same
  // bytes on the host.
  std::vector<at::Tensor> park();
  void restore(const std::vector<at::Tensor>& parked);
  // As park(), and forgets everything; exchange() must follow.
  void drop();

  at::Device device() const { return device_; }
  int64_t bytes() const;                        // of weights and quantised copies on the device
  at::Tensor at_rest(Parameter& weight) const;  // see weight_at_rest()

  at::Tensor acquire(Parameter& parameter) override;
  void release(Parameter&) override {}
  GradTarget grad_target(Parameter& parameter) override;
  void grad_ready(Parameter&) override {}
  int64_t values_version() const override { return version_; }
  bool only_forward() const override { return true; }
  void quantized(Parameter& weight, QuantizedTensor& copies) override;

 private:
  // Values, then quantised copies.
  std::vector<at::Tensor*> held() const;
  // Whether the value is made anew from exchanged ones, not overwritten.
  bool holds_no_value(const Parameter& parameter) const;

  Module& module_;
  const at::Device device_;
  int64_t version_ = 0;
  std::map<Parameter*, QuantizedTensor*> copies_;
  std::function<at::Tensor(Parameter&)> draw_;  // of place_drawn(), until values are exchanged
  bool int8_ = false;
  mutable std::map<Parameter*, Int8Weight> int8_weights_;
};

}  // namespace megatron
