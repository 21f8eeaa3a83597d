// What state-space layers compute between their linears, to be timed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct SsmWork {
  std::string name;
  // Of one run: operations, in chunks of 128 rows (64 of gated delta nets), products counted in
  // full; bytes that it must read and write at least
  double operations = 0, bytes = 0;
  std::function<void()> run;
  // Of layers of this letter in a forward and backward; 0 runs: of decoding
  char letter = ' ';
  int runs = 1;
};

// Convolution, scan and norm of each kind of such layers that the model has, forward and backward,
// on a micro-batch of random numbers, and the decoding step of one sequence and of 64.
std::vector<SsmWork> ssm_work(const TransformerConfig& config, int64_t samples, at::ScalarType type,
                              c10::Device device);

}  // namespace megatron
