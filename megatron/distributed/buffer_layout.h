// Where parameters lie in the flat buffers of a store. Pure arithmetic, without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megatron {

struct BufferParameter {
  int64_t num_elements = 0;
  bool own_bucket = false;  // tied embedding: its gradient is complete last
  int unit = 0;             // a bucket does not span units
  bool frozen = false;      // has no gradient
  bool embedding = false;
  bool whole = false;  // no shard border cuts it
  bool wide = false;   // its values are fp32 in any model; in buckets apart
};

struct BufferOptions {
  int64_t bucket_size = 0;  // elements after which a bucket closes; 0: never
  // Above 1, bucket ends are rounded up to lcm(num_shards, shard_alignment)
  int64_t num_shards = 1;
  int64_t shard_alignment = 128;  // elements
  // Elements of the model's type that a wide value takes: 2 in bf16 and fp16, 1 in others
  int64_t wide_elements = 1;
};

struct BufferSlot {
  int64_t begin = 0;  // element offset, a multiple of 64
  int64_t end = 0;
  int bucket = 0;
};

struct BufferBucket {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<int> parameters;  // indices, in buffer order
  bool own = false;             // holds a single parameter, with own_bucket
  int unit = 0;                 // unit of its last parameter
  bool frozen = false;          // all its parameters are frozen
  // Contains only embeddings; with sharded gradients it is reduced once, after the last pass
  bool table = false;
  bool wide = false;  // of wide parameters alone
  // Where its values begin among those of all buckets, and how many elements of the model's type
  // they take
  int64_t value_begin = 0;
  int64_t value_elements = 0;
};

struct BufferLayout {
  std::vector<BufferSlot> slots;  // by parameter index
  std::vector<BufferBucket> buckets;
  int64_t num_elements = 0;
  int64_t num_trained_elements = 0;  // elements with gradients; they come first
  int num_trained_buckets = 0;       // they come first
  int64_t num_value_elements = 0;    // of the model's type, for the values of all buckets
};

// The part of the model that a parameter belongs to by its name: a layer, "decoder.layers.3" of
// "decoder.layers.3.mlp.linear_fc1.weight", or a module outside the layers, "embedding" of
// "embedding.word_embeddings.weight".
struct ModelPart {
  std::string name;
  int64_t layer = -1;  // its number, from 0; -1: outside the layers
  bool is_layer() const { return layer >= 0; }
};
ModelPart part_of_model(const std::string& parameter);

// The sharding unit of each parameter, from names in model order: a layer, or a module outside the
// layers. Norms outside the layers join the unit before them, or, at the start of a stage, the one
// after: a separate small gather would arrive late and delay the large one that follows.
std::vector<int> sharding_units(const std::vector<std::string>& names,
                                const std::vector<bool>& norms);

// Parameters are given in model order and placed in reverse, because backward completes the last
// ones first. Frozen ones follow all others, in separate buckets. So do wide ones inside a unit,
// whose buckets fill beside the others.
//
// With several shards a bucket's slice is the smallest in which its parameters fit in this order
// without a cut through a whole one; the gaps at the end of slices belong to no parameter. So that
// they stay small, a bucket of whole parameters closes only when every shard could hold the largest
// of them: at bucket_size or num_shards times its size, whichever is more.
BufferLayout plan_buffer(const std::vector<BufferParameter>& parameters,
                         const BufferOptions& options);

// By bucket, the first bucket of those that are gathered together with it: the buckets of a unit,
// wide ones included, and each with own_bucket apart.
std::vector<int> gathered_together(const BufferLayout& layout);

}  // namespace megatron
