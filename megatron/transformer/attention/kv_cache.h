// What attention keeps of earlier positions for decoding, in blocks of a pool: keys and values, or
// latents.
#pragma once

#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

// Keys and values of the earlier positions of one attention layer.
class KVCache : public LayerState {
 public:
  // Writes the keys and values of a batch's rows to their places and attends: each row to its
  // sequence up to its own position. A bias by distance (options.distance_bias) is that of as many
  // positions as there are, or more. Returns [t, 1, n, v].
  at::Tensor attend(const AddedRows& added, const PagedRows& rows, const AttentionOptions& options);

  std::vector<PagedBuffer*> paged() override { return {&keys_, &values_}; }

 private:
  PagedBuffer keys_, values_;
};

// [norm(c) | rot(r)] of the earlier positions of one layer of multi-latent attention, [t, 1, kv
// rank + rotated features]: one key of all heads.
class LatentCache final : public LayerState {
 public:
  PagedBuffer latents;

  std::vector<PagedBuffer*> paged() override { return {&latents}; }
};

}  // namespace megatron
