// A linear layer of which every tensor-parallel rank has all of the weight.
#pragma once

#include "megatron/models/model.h"

namespace megatron {

//   x       [..., inputs]
//   return  [..., outputs]
// Parameters: weight [outputs, inputs], bias. With sequence parallelism a rank sees its own rows,
// so that gradients are partial sums over the tensor ranks. Communication: none.
class Dense : public Module {
 public:
  Dense(const ModelConfig& config, int64_t outputs);  // of hidden_size inputs
  at::Tensor forward(const at::Tensor& x);

 private:
  Parameter weight_, bias_;
};

}  // namespace megatron
