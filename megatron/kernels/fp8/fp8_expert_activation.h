// Gated activations of experts (kernels/experts/weighted_activation.h) with FP8 output: equal, bit
// for bit, to the activation followed by Fp8ExpertCast, without the tensor between them. Where the
// scale of an expert is not given, its elements are computed twice. CUDA alone.
//
//   x [rows, 2 f] -> y [rows, f]: 4 bytes moved (bf16) and one per orientation, per element of y
//
// There is no such backward: with three rows to read and two to write transposed, one kernel that
// does both was not faster than two.
#pragma once

#include "megatron/kernels/experts/weighted_activation.h"
#include "megatron/kernels/fp8/fp8_experts.h"

namespace megatron {

struct Fp8ExpertActivation {
  WeightedActivationArgs activation;  // gated; the forward's x and weights alone are used
  Fp8ExpertCast cast;                 // of the result, without `square`; x is not used
};
// f is a multiple of 16, of blocks 128; tensors are 16-byte aligned.
void fp8_expert_activation_cuda(const Fp8ExpertActivation& args, void* stream);

}  // namespace megatron
