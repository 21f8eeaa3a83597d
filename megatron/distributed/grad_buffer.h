// Where gradients are accumulated and summed over the data ranks: bucket by bucket, in fp32 (fp64
// for fp64 models).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/parameter.h"

namespace megatron {

struct GradReduction {
  bool overlap = false;     // reductions overlap with the backward
  bool in_bf16 = false;     // communicate in bf16; sums are kept in fp32
  bool peer_copies = true;  // peer-to-peer copies where possible
};

// This rank's shard of a bucket lies in flat() at own_begin(bucket) and has
// layout.shard_elements(bucket) elements. Frozen parameters have no gradient; no function may be
// called for them or their buckets.
class GradBuffer {
 public:
  virtual ~GradBuffer() = default;
  // Where the gradient of a parameter is accumulated, shaped like it, to be written: beta is 0 for
  // the first gradient since zero().
  virtual GradTarget target(int parameter) = 0;
  // The same, to be read.
  virtual at::Tensor view(int parameter) = 0;
  virtual void zero() = 0;
  // Starts to sum a bucket over the data ranks, unless it first accumulates further passes. `last`:
  // no pass follows. Collective: every rank reduces the same buckets in the same order.
  virtual void reduce(int bucket, bool last) = 0;
  // Waits until this rank's shards are sums over all data ranks. Collective.
  virtual void finish() = 0;

  virtual const at::Tensor& flat() const = 0;
  virtual int64_t own_begin(int bucket) const = 0;
};

// Every rank keeps all gradients of the step, and reduces each bucket once: all-reduce, or
// reduce-scatter into its shard and all-reduce of the shard between instances. Memory: 4 bytes per
// trained element.
std::unique_ptr<GradBuffer> make_whole_grads(const ShardedLayout& layout, at::TensorOptions options,
                                             const GradReduction& reduction);

// Every rank keeps only its shards. A bucket is whole while a pass fills it; reduce() then
// reduce-scatters it into the shards. Embeddings stay whole until the last pass: a pass writes few
// of their rows, and reducing all of them is the longest reduction. Instances are summed once, by
// finish(). Memory: 4 bytes per trained element of a shard, plus the buckets being filled and the
// last one being reduced.
std::unique_ptr<GradBuffer> make_sharded_grads(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const GradReduction& reduction);

}  // namespace megatron
