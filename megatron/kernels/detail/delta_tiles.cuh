// What the kernels of the backward of the gated delta rule leave each other: tiles of 64 rows, for
// each chunk of each sample, bf16.
#pragma once

#include "megatron/kernels/detail/delta_chunk.cuh"
#include "megatron/kernels/ssm/gated_delta_backward.h"

namespace megatron::delta {

inline int64_t chunks_of(const GatedDeltaArgs& args) { return (args.tokens + kChunk - 1) / kChunk; }

// W and U lie at the start of the workspace, as the forward's; then the tiles.
inline int64_t tiles_after_writes(const GatedDeltaArgs& args) {
  return (gated_delta_workspace(args) + 127) / 128 * 128;
}

// With rows that are columns of v: S^T before a chunk and its gradient G^T after it [64, K]; E^T
// and its gradient [64, tokens]. T [tokens, tokens].
struct DeltaTiles {
  void *states, *gradients, *writes, *write_gradients, *inverses;
  int64_t columns;  // tiles of a chunk of the first four

  DeltaTiles(const GatedDeltaArgs& args, char* at)
      : columns(args.value_heads * (args.value_size / 64)) {
    const int64_t write = args.samples * chunks_of(args) * columns * kPanel;
    const int64_t state = write * (args.key_size / 64);
    states = at;
    gradients = at + state;
    writes = at + 2 * state;
    write_gradients = at + 2 * state + write;
    inverses = at + 2 * state + 2 * write;
  }
};

// Both walks over the chunks: S and E from the first chunk, G and the gradient of E from the last.
void compute_walks(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                   cudaStream_t stream);
// What remains is of each chunk by itself: the gradients.
void compute_gradients(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                       cudaStream_t stream);

}  // namespace megatron::delta
