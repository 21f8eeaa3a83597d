// Where parameters lie, and how the ranks that update parts of them get the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "megatron/distributed/sharded_layout.h"

namespace megatron {

class ShardGather;

// The parts that this rank owns lie in flat() at own_begin(bucket), layout.shard_elements(bucket)
// long.
class ValueBuffer {
 public:
  virtual ~ValueBuffer() = default;
  // The value to compute with; see ParameterStore.
  virtual at::Tensor acquire(int parameter) = 0;
  virtual void release(int parameter) = 0;
  // The owned parts are about to get new values: waits for what is under way, and until no peer
  // reads them. Collective.
  virtual void will_change() = 0;
  // The owned parts have new values; those of frozen parameters only with `frozen_too`. Collective.
  virtual void changed(bool frozen_too) = 0;
  // Waits for the gathers under way.
  virtual void finish() = 0;
  // Gives up what nobody uses at the moment.
  virtual void free_unused() {}
  // Calls the visitor with every parameter, its value being whole; what it writes becomes the
  // value. Collective; every rank writes the same.
  virtual void edit(const std::function<void(Parameter&)>& visitor) = 0;
  // The largest number of layers that were gathered at one time since the last call.
  virtual int take_peak_gathered() { return 0; }

  virtual const at::Tensor& flat() const = 0;
  virtual int64_t own_begin(int bucket) const = 0;
  virtual const ShardGather& gather() const = 0;
};

struct ValueGathering {
  bool overlap = false;
  bool peer_copies = true;  // where they are possible; else collectives
};

// Every rank holds every value; Parameter::value is a view of it. With several shards changed()
// gathers bucket by bucket; with `overlap` acquire() waits for a bucket when it is needed. Memory:
// 2 bytes per element in bf16.
std::unique_ptr<ValueBuffer> make_whole_values(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const ValueGathering& gathering);

// Every rank holds its own parts. acquire() gathers the bucket of the parameter (with it that of
// its layer's frozen parameters, or its trained ones: a layer) and keeps it until another layer is
// entered and nobody uses it; Parameter::value stays empty. With `overlap` the layer that followed
// last time is gathered meanwhile. Memory: 2 bytes per element and shard in bf16, and one gathered
// layer (two with `overlap`) besides those in use. Every rank of an instance must acquire in the
// same order.
std::unique_ptr<ValueBuffer> make_sharded_values(const ShardedLayout& layout,
                                                 at::TensorOptions options,
                                                 const ValueGathering& gathering);

}  // namespace megatron
