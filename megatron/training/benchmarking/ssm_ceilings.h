// What state-space layers compute between their linears, measured.
#pragma once

#include "megatron/training/benchmarking/ceilings.h"

namespace megatron {

// Convolution, scan and norm of each kind of such layers that the model has, forward and backward,
// on one micro-batch of random numbers, and the decoding step of one sequence and of 64. Bytes are
// what each must read and write at least; operations those of chunks of 128 rows (64 of gated delta
// nets), products counted in full.
std::vector<Ceiling> ssm_ceilings(const Arguments& arguments, at::ScalarType type,
                                  c10::Device device, double least);

}  // namespace megatron
