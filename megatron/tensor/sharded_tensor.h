// Describes the part of a logical tensor that this rank holds, for checkpoints, optimizers and
// digests. Without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/base/dtype.h"

namespace megatron {

// An N-dimensional block of a global tensor: offset and shape per dimension.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> shape;
  int64_t num_elements() const {
    int64_t n = 1;
    for (int64_t s : shape) n *= s;
    return n;
  }
  bool operator==(const Box&) const = default;
};

// One box of the global tensor and where it begins in this rank's local tensor. A gated FC1 split
// over ranks has two pieces (a slice of the gate rows, then one of the up rows); a padded
// vocabulary has a piece that is shorter than the local tensor.
struct ShardPiece {
  Box global;
  std::vector<int64_t> local_offset;
};

struct ShardedTensor {
  // Logical name, with the global layer index ("decoder.layers.3.mlp.linear_fc1.weight")
  std::string key;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> global_shape;  // of the logical tensor, without vocabulary padding
  std::vector<int64_t> local_shape;   // of the local tensor, row-major
  std::vector<ShardPiece> pieces;     // empty: the local tensor is the whole global tensor
  // The range of the flattened local tensor that `data` holds (optimizer states sharded over data
  // ranks); end < 0: all of it.
  int64_t flat_begin = 0;
  int64_t flat_end = -1;
  int replica_id = 0;  // only replica 0 writes
  // Host memory, contiguous, starting with element flat_begin of the local tensor
  void* data = nullptr;
};

}  // namespace megatron
