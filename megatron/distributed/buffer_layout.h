// Where parameters lie in the flat buffers of a store (contracts i). Pure arithmetic, without
// libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megatron {

struct BufferParameter {
  int64_t num_elements = 0;
  bool own_bucket = false;  // a tied embedding, whose gradient is complete last
  int unit = 0;             // neighbours of different units lie in different buckets
  bool frozen = false;      // takes no gradient
  bool embedding = false;
};

struct BufferOptions {
  int64_t bucket_size = 0;  // elements after which a bucket closes; 0: never
  // Above 1, bucket ends are rounded up to lcm(num_shards, shard_alignment)
  int64_t num_shards = 1;
  int64_t shard_alignment = 128;  // elements
};

struct BufferSlot {
  int64_t begin = 0;  // element offset, a multiple of 64
  int64_t end = 0;
  int bucket = 0;
};

struct BufferBucket {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<int> parameters;  // indices, in the order of the buffer
  bool own = false;             // holds one parameter with own_bucket
  int unit = 0;                 // of its last parameter
  bool frozen = false;          // so are all its parameters
  // Embeddings and nothing else; sharded gradients of it are summed after the last pass
  bool table = false;
};

struct BufferLayout {
  std::vector<BufferSlot> slots;  // by index of the parameter
  std::vector<BufferBucket> buckets;
  int64_t num_elements = 0;
  int64_t num_trained_elements = 0;  // the first ones, which take gradients
  int num_trained_buckets = 0;       // the first ones
};

// The unit of each parameter, of names in model order, when values are sharded: a layer, or a part
// around the layers. What the stack of layers has besides them, its final norm, goes with what
// comes before it or, first of all, behind it: a message of its own would be late for what needs it
// and in the way of the large one behind.
std::vector<int> sharding_units(const std::vector<std::string>& names);

// Parameters are given in model order and placed in reverse, because backward completes the last
// ones first. Frozen ones lie behind all others, in buckets of their own.
BufferLayout plan_buffer(const std::vector<BufferParameter>& parameters,
                         const BufferOptions& options);

}  // namespace megatron
