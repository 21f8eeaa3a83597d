#include "megatron/nn/forward_parameter_store.h"

#include "megatron/base/check.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Pinned for a GPU, so that copies run at the speed of the link.
at::Tensor on_host(const at::Tensor& value) {
  return at::empty(value.sizes(), value.options().device(at::kCPU).pinned_memory(value.is_cuda()))
      .copy_(value);
}

}  // namespace

bool holds_quantized_alone(const Parameter& parameter) {
  return parameter.quantization != QuantizationRecipe::kNone && !parameter.read_unquantized;
}

bool is_int8_weight(const Parameter& parameter) {
  if (parameter.local_shape.size() != 2 || parameter.read_unquantized) return false;
  return parameter.role == ParameterRole::kWeight || parameter.role == ParameterRole::kOutput ||
         parameter.role == ParameterRole::kEmbedding;
}

int64_t int8_store_bytes(const Parameter& parameter, int64_t element, bool has_head) {
  const int64_t value = c10::multiply_integers(parameter.local_shape) * element;
  if (!is_int8_weight(parameter)) return value;
  const int64_t codes = int8_bytes(parameter.local_shape[0], parameter.local_shape[1]);
  if (parameter.role != ParameterRole::kEmbedding) return codes;
  // Stages that share a table have one copy each.
  const bool multiplies = parameter.uses > 1 || (has_head && parameter.shared != nullptr);
  return multiplies ? value + codes : value;
}

at::Tensor weight_at_rest(Module& linear) {
  at::Tensor found;
  linear.visit([&](const std::string&, Parameter& parameter) {
    const auto* store = dynamic_cast<const ForwardParameterStore*>(parameter.store);
    if (store != nullptr && parameter.role == ParameterRole::kWeight && !found.defined())
      found = store->at_rest(parameter);
  });
  return found;
}

ForwardParameterStore::ForwardParameterStore(Module& module, at::ScalarType dtype,
                                             at::Device device)
    : module_(module), device_(device) {
  module.visit([&](const std::string&, Parameter& parameter) {
    const at::ScalarType type = value_type(parameter, dtype);
    parameter.value = device.is_cuda() ? host_zeros(parameter.local_shape, type)
                                       : at::zeros(parameter.local_shape, at::dtype(type));
    parameter.store = this;
  });
}

void ForwardParameterStore::place() {
  std::vector<at::Tensor*> values;
  module_.visit([&](const std::string&, Parameter& parameter) {
    if (!holds_quantized_alone(parameter)) values.push_back(&parameter.value);
  });
  upload(values, device_);
  module_.visit_state([&](const std::string&, at::Tensor& state) { state = state.to(device_); });
}

void ForwardParameterStore::place_drawn(int64_t seed, const ParallelGroups& groups) {
  draw_ = [this, seed, &groups](Parameter& parameter) {
    at::Tensor value = at::empty_like(parameter.value, parameter.value.options().device(device_));
    std::swap(value, parameter.value);
    initialize_parameter(parameter, seed, groups);
    std::swap(value, parameter.value);
    return value;
  };
  module_.visit([&](const std::string&, Parameter& parameter) {
    if (!holds_quantized_alone(parameter) || device_.is_cpu()) parameter.value = draw_(parameter);
  });
  module_.visit_state([&](const std::string&, at::Tensor& state) { state = state.to(device_); });
}

void ForwardParameterStore::exchange(const std::vector<at::Tensor>& values) {
  size_t next = 0;
  const auto take = [&]() -> const at::Tensor& {
    MEGATRON_ASSERT(next < values.size(), values.size(), " tensors are too few");
    return values[next++];
  };
  const auto put = [&](at::Tensor& value) {
    const at::Tensor& from = take();
    if (value.defined()) {
      value.copy_(from);
    } else {
      value = from.to(device_, /*non_blocking=*/false, /*copy=*/true);
    }
  };
  module_.visit([&](const std::string&, Parameter& parameter) {
    if (!holds_no_value(parameter)) return put(parameter.value);
    parameter.value = take();
    if (const auto copies = copies_.find(&parameter); copies != copies_.end()) *copies->second = {};
  });
  module_.visit_state([&](const std::string&, at::Tensor& state) { put(state); });
  draw_ = nullptr;
  int8_weights_.clear();
  copies_.clear();
  ++version_;
}

std::vector<at::Tensor*> ForwardParameterStore::held() const {
  std::vector<at::Tensor*> all;
  module_.visit([&](const std::string&, Parameter& parameter) { all.push_back(&parameter.value); });
  for (const auto& [parameter, copies] : copies_)
    for (QuantizedMatrix* matrix : {&copies->rows, &copies->columns})
      for (at::Tensor* tensor : {&matrix->codes, &matrix->scale})
        if (tensor->defined()) all.push_back(tensor);
  for (auto& [parameter, weight] : int8_weights_)
    for (at::Tensor* tensor : {&weight.panels, &weight.scales}) all.push_back(tensor);
  return all;
}

bool ForwardParameterStore::holds_no_value(const Parameter& parameter) const {
  return holds_quantized_alone(parameter) ||
         (int8_ && is_int8_weight(parameter) && parameter.role != ParameterRole::kEmbedding);
}

const Int8Weight* ForwardParameterStore::int8_weight(Parameter& weight) {
  if (!int8_ || !is_int8_weight(weight)) return nullptr;
  const auto [place, is_new] = int8_weights_.try_emplace(&weight);
  if (is_new) {
    place->second = to_int8(weight.value);
    if (holds_no_value(weight)) weight.value = at::empty({0}, weight.value.options());
  }
  return &place->second;
}

std::vector<at::Tensor> ForwardParameterStore::park() {
  std::vector<at::Tensor> parked;
  for (at::Tensor* tensor : held()) {
    parked.push_back(on_host(*tensor));
    tensor->reset();
  }
  return parked;
}

void ForwardParameterStore::restore(const std::vector<at::Tensor>& parked) {
  // Copies that were freed are found by their place alone.
  size_t next = 0;
  const auto back = [&](at::Tensor& tensor) { tensor = parked[next++].to(device_); };
  module_.visit([&](const std::string&, Parameter& parameter) { back(parameter.value); });
  for (const auto& [parameter, copies] : copies_) {
    back(copies->rows.codes);
    back(copies->rows.scale);
  }
  for (auto& [parameter, weight] : int8_weights_) {
    back(weight.panels);
    back(weight.scales);
  }
  MEGATRON_ASSERT(next == parked.size(), next, " of ", parked.size(), " tensors");
}

void ForwardParameterStore::drop() {
  for (at::Tensor* tensor : held()) tensor->reset();
}

int64_t ForwardParameterStore::bytes() const {
  int64_t sum = 0;
  for (const at::Tensor* tensor : held())
    if (tensor->defined() && tensor->device() == device_)
      sum += static_cast<int64_t>(tensor->nbytes());
  return sum;
}

at::Tensor ForwardParameterStore::at_rest(Parameter& weight) const {
  if (const auto copies = copies_.find(&weight); copies != copies_.end())
    return copies->second->rows.codes;
  return weight.value.defined() && weight.value.device() == device_ ? weight.value : at::Tensor();
}

at::Tensor ForwardParameterStore::acquire(Parameter& parameter) {
  at::Tensor value = parameter.value;
  if (value.device() != device_ && draw_) return draw_(parameter);
  if (value.device() != device_) upload({&value}, device_);
  return value;
}

GradTarget ForwardParameterStore::grad_target(Parameter& parameter) {
  MEGATRON_ASSERT(false, "a gradient of ", parameter.name, " of a model that is only used");
  return {};
}

void ForwardParameterStore::quantized(Parameter& weight, QuantizedTensor& copies) {
  copies_[&weight] = &copies;
  if (holds_quantized_alone(weight))
    weight.value = at::empty({0}, weight.value.options().device(device_));
}

}  // namespace megatron
