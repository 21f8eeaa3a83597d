// Rows of cases.h for the router.
#pragma once

#include <vector>

#include "megatron/tensor/experts/routing.h"
#include "tests/kernels/cases.h"

namespace megatron {

struct NamedRouting {
  const char* name;
  RoutingOptions options;  // without topk
  bool biased = false;
};

// Scores, groups and biases; those with groups need a multiple of 4 experts.
const std::vector<NamedRouting>& named_routings();

// Its options for k of E experts.
RoutingOptions routing_of(const NamedRouting& named, int64_t topk);

// As kernel_cases().
std::vector<KernelCase> routing_cases(bool perf);

}  // namespace megatron
