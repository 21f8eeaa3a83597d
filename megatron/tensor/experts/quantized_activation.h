// The weighted activation of experts (tensor/experts/weighted_activation.h), quantised for the
// product that it enters (tensor/experts/grouped_quantization.h): the result of the one followed by
// the other, to the bit. A gated activation on a GPU does not write the tensor between them. Not
// differentiable.
#pragma once

#include "megatron/tensor/experts/grouped_quantization.h"
#include "megatron/tensor/experts/weighted_activation.h"

namespace megatron {

//   x [n, f] ([n, 2f] when gated), weights [n] fp32, counts [E]; return: of [n, f]
QuantizedTensor quantized_weighted_activation(const at::Tensor& x, const at::Tensor& weights,
                                              const ExpertActivation& activation,
                                              const at::Tensor& counts,
                                              const QuantizationOptions& options,
                                              Orientations wanted, const ExpertScales& by = {});

}  // namespace megatron
