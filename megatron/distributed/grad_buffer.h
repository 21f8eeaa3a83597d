// Where gradients are accumulated, and how they become sums over the data ranks: bucket by bucket,
// fp32 (fp64 for fp64 models).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/parameter.h"

namespace megatron {

struct GradReduction {
  bool overlap = false;     // a reduction may still run when the next gradients are computed
  bool in_bf16 = false;     // what travels; every sum that is kept is fp32
  bool peer_copies = true;  // parts are copied out of the peers' memory where that is possible
};

// The parts that this rank owns lie in flat() at own_begin(bucket), layout.shard_elements(bucket)
// long. Frozen parameters have no gradient: nothing here may be asked about them or their buckets.
class GradBuffer {
 public:
  virtual ~GradBuffer() = default;
  // What the gradient of a parameter is added to, shaped like it. For one that is written: beta is
  // 0 for the first gradient since zero().
  virtual GradTarget target(int parameter) = 0;
  // The same for one that is read.
  virtual at::Tensor view(int parameter) = 0;
  virtual void zero() = 0;
  // Starts to sum a bucket over the data ranks, unless it takes the gradients of further passes
  // first. `last`: none follows. Collective: every rank reduces the same buckets in the same order.
  virtual void reduce(int bucket, bool last) = 0;
  // Waits until this rank's parts are sums over all data ranks. Collective.
  virtual void finish() = 0;

  virtual const at::Tensor& flat() const = 0;
  virtual int64_t own_begin(int bucket) const = 0;
};

// Every rank keeps all gradients of the step, and reduces each bucket once: all-reduce, or
// reduce-scatter into its own part and all-reduce of that part between instances. Memory: 4 bytes
// per element that is trained.
std::unique_ptr<GradBuffer> make_whole_grads(const ShardedLayout& layout, at::TensorOptions options,
                                             const GradReduction& reduction);

// Every rank keeps its own parts. A bucket that takes gradients is whole for a moment; each
// reduce() scatters it into the parts. A table of embeddings is whole until the last pass: a pass
// writes few of its rows, and the sum of all of them would be the longest of all. Instances are
// summed once, by finish(). Memory: 4 bytes per trained element and shard, and the buckets in
// flight: the ones that are being filled and the last one reduced.
std::unique_ptr<GradBuffer> make_sharded_grads(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const GradReduction& reduction);

}  // namespace megatron
