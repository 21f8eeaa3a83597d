// A bound on the rows that an expert takes from one rank (--moe-expert-capacity-factor).
//
// With R rows on this rank, k choices each, E experts: C = min(R, ceil(R k / E factor)). Rows are
// those of this rank, so that what is dropped depends on how tensor and context ranks divide them.
// Megatron does not bound C by R, and fails on it when padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "megatron/transformer/config/moe/moe.h"
#include "megatron/transformer/moe/routing.h"

namespace megatron {

struct CapacityOptions {
  double factor = 1.0;
  DropPolicy policy = DropPolicy::kProbs;
  bool pad = false;  // every expert gets exactly C rows
};

// C, in fp64.
int64_t expert_capacity(int64_t rows, int64_t k, int64_t num_experts, double factor);

// Which of the choices remain, Routing::kept. Of the weights only the order matters. Does not wait
// for the device.
at::Tensor within_capacity(const Routing& routing, int64_t num_experts,
                           const CapacityOptions& options);

// Which rows fill each expert up to `capacity` rows, Routing::padding: the first of those that did
// not choose it. Does not wait for the device.
//   routing  with choices and kept, at most `capacity` for each expert
at::Tensor padding_to_capacity(const Routing& routing, int64_t num_experts, int64_t capacity);

}  // namespace megatron
