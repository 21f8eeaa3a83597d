// What a layer of attention and experts costs a rank. Letters as in transformer/layer/layer_cost.h;
// E experts over n ranks.
//
// Saved by the experts, besides the residual stream:
//   norm      R (h e + 4 k)   output and statistics
//   tokens    n R h e         those of all ranks (n = 1: the norm's output)
//   experts   (T F e / t + T f e / t + R h e) E    what an MLP saves, for n times the tokens and
//                             E / n experts, and its output
//   router    about 12 R E
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

inline constexpr int64_t kNumExperts = 4;

// As LayerCostFunction.
LayerCost experts_cost(const TransformerConfig& config, int64_t layer_number,
                       const LayerShape& shape, bool offloaded);

}  // namespace megatron
