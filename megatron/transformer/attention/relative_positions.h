// Relative positions of T5: each head adds to the score of a query and a key a number for the
// bucket of their distance. Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
#pragma once

#include <memory>
#include <vector>

#include "megatron/nn/module.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct ParallelGroups;

// Near distances have a bucket each, farther ones share them by the logarithm of the distance; from
// max_distance on all are in the last one.
struct RelativeBuckets {
  int64_t buckets = 32;
  int64_t max_distance = 128;
  bool bidirectional = true;  // half of the buckets for keys behind the query; else these are in 0
};

// The first distance of each bucket of one direction, ascending.
std::vector<int64_t> bucket_starts(const RelativeBuckets& buckets);

// A table of one stack of layers. Parameter: relative_attention_bias.weight [buckets, n], whole on
// every tensor rank, which reads the columns of its heads: gradients are partial sums over kTensor.
class RelativePositions : public Module {
 public:
  // `table`: of another segment on this rank, which must outlive this one; null: its own. Throws
  // Error when the heads do not divide over the tensor ranks.
  RelativePositions(const TransformerConfig& config, const RelativeBuckets& buckets,
                    const ParallelGroups& groups, Parameter* table);

  // Of s queries and keys, [n/t, 2 s - 1], differentiable: element key - query + s - 1 of a head is
  // what AttentionOptions::distance_bias says. fp32 (fp64 for fp64 models).
  at::Tensor bias(int64_t s);
  Parameter& table() { return *table_; }

 private:
  const RelativeBuckets buckets_;
  const std::vector<int64_t> starts_;
  const int64_t heads_, first_head_;  // of this rank
  Parameter own_;                     // unless the table is another segment's
  Parameter* table_ = &own_;
};

}  // namespace megatron
