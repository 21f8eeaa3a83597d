// Where parameter values lie, and how the ranks that update shards of them get the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "megatron/distributed/sharded_layout.h"

namespace megatron {

class ShardGather;

// This rank's shard of a bucket lies in flat() at own_begin(bucket) and has
// layout.value_shard_elements(bucket) elements, both counted in the model's type.
class ValueBuffer {
 public:
  virtual ~ValueBuffer() = default;
  // The value to compute with; see ParameterStore.
  virtual at::Tensor acquire(int parameter) = 0;
  virtual void release(int parameter) = 0;
  // Call before writing this rank's shards: waits for gathers in flight, and until no peer reads
  // them. Collective.
  virtual void will_change() = 0;
  // Call after writing this rank's shards; those of frozen parameters are included only with
  // `frozen_too`. Collective.
  virtual void changed(bool frozen_too) = 0;
  // Waits for gathers in flight.
  virtual void finish() = 0;
  // Frees gathered values that are not in use.
  virtual void free_unused() {}
  // Calls the visitor with every parameter, its whole value gathered; what the visitor writes
  // becomes the value. Collective; every rank must write the same.
  virtual void edit(const std::function<void(Parameter&)>& visitor) = 0;
  // The largest number of layers gathered at the same time since the last call.
  virtual int take_peak_gathered() { return 0; }

  virtual const at::Tensor& flat() const = 0;
  virtual int64_t own_begin(int bucket) const = 0;
  virtual const ShardGather& gather() const = 0;
};

struct ValueGathering {
  bool overlap = false;
  bool peer_copies = true;  // where possible; otherwise collectives
};

// Every rank holds every value; Parameter::value is a view of it. With several shards changed()
// all-gathers bucket by bucket; with `overlap` acquire() waits for a bucket when it is needed.
// Memory: 2 bytes per element in bf16.
std::unique_ptr<ValueBuffer> make_whole_values(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const ValueGathering& gathering);

// Every rank holds only its shards. acquire() gathers the layer of the parameter, that is its
// bucket and, if only some of the layer's parameters are frozen, the bucket of the others. It is
// kept until another layer is entered and none of it is in use; Parameter::value stays empty. With
// `overlap` the layer that came next last time is prefetched. Memory: 2 bytes per element of a
// shard in bf16, plus one gathered layer (two with `overlap`) besides those in use. Every rank of
// an instance must acquire in the same order.
std::unique_ptr<ValueBuffer> make_sharded_values(const ShardedLayout& layout,
                                                 at::TensorOptions options,
                                                 const ValueGathering& gathering);

}  // namespace megatron
