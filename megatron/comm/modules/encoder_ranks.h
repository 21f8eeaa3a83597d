// Encoders of media on ranks of their own: a job of two modules, the encoders and the language
// model, each with groups of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "megatron/comm/mesh.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// The ranks of the encoders: the first ones of the world, and those of the language model behind
// them (Megatron's order of modules). Of the encoders' ranks, neighbours divide layers (tensor),
// and each such block has images and sounds of its own (data).
struct EncoderRanks {
  int64_t tensor = 1;
  int64_t data = 0;  // 0: encoders are on ranks of the language model

  bool any() const { return data > 0; }
  int64_t count() const { return tensor * data; }
  bool holds(int rank) const { return rank < count(); }  // of the world
};

// As without them, of the ranks behind those of the encoders. Throws UsageError if none is left, or
// if sizes do not divide them.
int64_t data_parallel_size(const ParallelConfig& config, const EncoderRanks& encoder,
                           int64_t world_size);
Mesh make_mesh(const ParallelConfig& config, const EncoderRanks& encoder, int64_t world_size);

// Where a rank is, "tp 1 pp 2 dp 0" or "encoder tp 1 dp 0".
std::string place_in_mesh(const ParallelConfig& config, const EncoderRanks& encoder, int rank,
                          int world_size);

// Builds this rank's groups of `world`: `world` itself, and groups within this rank's module; every
// rank calls it with equal arguments.
ParallelGroups make_parallel_groups(const ParallelConfig& config, const EncoderRanks& encoder,
                                    const std::shared_ptr<Backend>& world);

// Of values that are equal on all ranks of a module the sum over both modules, in place, on all
// ranks; of one module nothing is done. Communication: an all-reduce over the world.
void sum_over_modules(const at::Tensor& values, const ParallelGroups& groups);

}  // namespace megatron
