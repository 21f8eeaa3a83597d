// The second sublayer of a transformer layer: the MLP, or what stands in its place.
#pragma once

#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

struct ParallelGroups;

// Sees tokens without their order: no position, document or state enters.
class FeedForward : public Sublayer {
 public:
  // What recomputation and offloading of the whole are called.
  virtual SublayerNames names() const { return {"mlp", "mlp_norm"}; }
};

// `layer_number` is global and counts from 1. The groups must outlive what it returns.
using FeedForwardMaker = std::unique_ptr<FeedForward> (*)(const TransformerConfig& config,
                                                          int64_t layer_number,
                                                          bool sequence_parallel,
                                                          const ParallelGroups& groups);

}  // namespace megatron
