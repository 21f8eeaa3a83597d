// Whether the routers of a layout, computing in the run's own type, choose the experts that those
// of one rank choose.
//
// Rounding decides between scores that are nearly equal. Three runs on the same choices are known:
// of one rank in fp64 (E, exact), of one rank in the own type (S), and of the layout in the own
// type (L), and of S and L what each router would choose by itself. Where they differ, the choice
// of L must lie within rounding of a tie: for each logit of E there is a change of at most twice
// the largest error of S in that layer, |S - E|, after which E chooses as L does.
#pragma once

#include <vector>

#include "megatron/kernels/experts/routing.h"
#include "megatron/training/proving/equivalence.h"

namespace megatron {

struct RoutingComparison {
  std::vector<Comparison> comparisons;  // by layer and use: the largest such change, and its limit
  int64_t tokens = 0;                   // routed tokens that were compared, over all layers
  int64_t differing = 0;                // those that L sends to other experts than S
};

// Compares TrainingTrace::routers of the same steps.
RoutingComparison compare_routing(const LogicalTensors& layout, const LogicalTensors& serial,
                                  const LogicalTensors& exact, const RoutingOptions& options);

}  // namespace megatron
