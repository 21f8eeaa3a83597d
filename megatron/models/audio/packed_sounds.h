// The sounds of a micro-batch as an encoder of sounds reads them, one after another without
// padding, and where their features stand in the sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/models/audio/audio_config.h"
#include "megatron/models/common/features_ahead.h"
#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

struct SeenSound {
  int64_t sample = 0;  // of the micro-batch, whose sounds are in the order of its text
  int64_t frames = 0;  // that show any of its samples
  int owner = 0;       // the rank that encodes it (datasets/image_plan.h)
};

struct PackedSounds {
  int64_t sounds = 0;         // that this rank encodes
  int64_t all_sounds = 0;     // of all ranks that divide the sounds
  int64_t most_features = 0;  // of the rank that has most of them
  // Ranks that divide the sounds. Their features follow each other, those of a rank in
  // most_features rows; 1: this rank encodes all
  int ranks = 1;
  std::vector<int64_t> parts = {};  // as PackedImages::parts
  // [F, mel bins]: for each clip of this rank's sounds with r rows the frames -1 to 2 r, zeros
  // where the clip has none (media/log_mel.h); undefined where it has a later part of the encoder
  at::Tensor frames;
  at::Tensor before;     // [2 R] int64: of each frame that is read the row of the one before it
  at::Tensor continues;  // [R, 1] fp32: 0 for the first row of a clip, else 1
  at::Tensor positions;  // [R] int64: of the rows in their clips
  at::Tensor cells;      // [N] int64: the first row of each of this rank's features
  // [all N] int64: i s + j where a feature is row j of sample i. `taken` [all N] int64: which
  // features they are; undefined: all of them in order.
  at::Tensor places, taken;
  int64_t features() const { return cells.size(0); }  // of this rank
  // The rows, and empty ones behind them; they attend within their clip.
  std::shared_ptr<const UnpaddedRows> segments;
  // Of this rank's sounds, as PackedImages::ahead
  std::shared_ptr<const FeaturesAhead> ahead;

  // As a context-parallel rank reads them (PackedImages::of_tokens).
  PackedSounds of_tokens(const at::Tensor& held, int64_t b, int64_t s) const;
  // Those of one sequence as `b` rows of `s` tokens that begin with it (PackedImages::of_rows).
  PackedSounds of_rows(int64_t b, int64_t s) const;
};

// Of samples of `length` tokens with placeholders: `tokens` [b, s] row by row. Throws Error for a
// sound that is too short or too long, and naming the sample, both numbers and its sounds where its
// placeholders are not as many as its features. With several ranks `frames` are those of the sounds
// whose owner is `rank`, in the order of all; undefined: the rank does not read them.
//
// `replicas` as in pack_images().
//
// On the host; `frames` may be on any device, the rest is made on the CPU.
PackedSounds pack_sounds(const AudioConfig& config, std::span<const SeenSound> sounds,
                         at::Tensor frames, std::span<const int64_t> tokens, int64_t samples,
                         int64_t audio_token, int rank = 0, int ranks = 1, int64_t replicas = 0);

// The same on another device. Copies to a GPU are asynchronous, through page-locked memory.
PackedSounds to_device(const PackedSounds& sounds, at::Device device);

// Rows of `frames` that a sound of so many frames has.
int64_t packed_frames(const AudioConfig& config, int64_t frames);

}  // namespace megatron
