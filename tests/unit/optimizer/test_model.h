// A model that consists of parameters only, with given gradients, for tests of the optimizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/tensor/torch.h"

namespace megatron {

class TestModel : public Module {
 public:
  Parameter& declare(const std::string& name, std::vector<int64_t> shape,
                     ParameterRole role = ParameterRole::kWeight) {
    owned_.push_back(std::make_unique<Parameter>());
    Parameter& parameter = *owned_.back();
    parameter.local_shape = shape;
    parameter.global_shape = shape;
    parameter.role = role;
    add(name, &parameter);
    return parameter;
  }

  Parameter& operator[](size_t k) { return *owned_.at(k); }
  size_t size() const { return owned_.size(); }

 private:
  std::vector<std::unique_ptr<Parameter>> owned_;
};

// p[i] = cos(0.37 i + k)
inline void start_values(TestModel& model) {
  for (size_t k = 0; k < model.size(); ++k) {
    const at::Tensor i = at::arange(model[k].value.numel(), at::kDouble);
    model[k].value.copy_(at::cos(i * 0.37 + static_cast<double>(k)).view(model[k].local_shape));
  }
}

// g[i] = amplitude sin(0.7 i + 1.3 t + k) + 0.1 p[i], times `factor`
inline void set_gradients(TestModel& model, const DistributedDataParallel& ddp, int t,
                          double amplitude, double factor) {
  for (size_t k = 0; k < model.size(); ++k) {
    if (!model[k].trainable) continue;
    const at::Tensor i = at::arange(model[k].value.numel(), at::kDouble);
    const at::Tensor wave =
        at::sin(i * 0.7 + (1.3 * t + static_cast<double>(k))).view(model[k].local_shape);
    const at::Tensor value = model[k].value.to(at::kDouble);
    ddp.grad(model[k]).copy_((wave * amplitude + value * 0.1) * factor);
  }
}

}  // namespace megatron
