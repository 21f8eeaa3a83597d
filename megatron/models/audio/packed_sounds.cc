#include "megatron/models/audio/packed_sounds.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/models/common/segments.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Rows of each clip of a sound.
std::vector<int64_t> clips_of(const AudioConfig& config, const SeenSound& sound) {
  const int64_t rows = config.sound_rows(sound.frames);
  if (config.stacks())
    return std::vector<int64_t>(static_cast<size_t>(rows / kAudioRows), kAudioRows);
  return {rows};
}

void check_length(const AudioConfig& config, const SeenSound& sound) {
  MEGATRON_CHECK(config.sound_features(sound.frames) > 0, "a sound of ", sound.frames,
                 " frames (of 10 ms) has no feature", "\nhint: at least 3");
  MEGATRON_CHECK(config.stacks() || sound.frames <= 2 * kAudioRows, "a sound of ", sound.frames,
                 " frames (of 10 ms): at most ", 2 * kAudioRows, ", 30 s");
}

// What the encoder reads of this rank's clips.
void pack_rows(const AudioConfig& config, const std::vector<int64_t>& clips, PackedSounds& out) {
  std::vector<int64_t> before, positions, cells;
  std::vector<float> continues;
  int64_t first = 0;  // of the clip's frames
  for (const int64_t rows : clips) {
    for (int64_t frame = 0; frame < 2 * rows; ++frame) before.push_back(first + frame);
    first += 2 * rows + 2;
    for (int64_t i = 0; i + config.rows_of_a_feature() <= rows; i += config.rows_of_a_feature())
      cells.push_back(std::ssize(positions) + i);
    for (int64_t i = 0; i < rows; ++i) {
      positions.push_back(i);
      continues.push_back(i > 0 ? 1.0F : 0.0F);
    }
  }
  out.segments = segments_of_lengths(clips);
  out.before = at::tensor(before, at::kLong);
  out.positions = at::tensor(positions, at::kLong);
  out.continues = at::tensor(continues, at::kFloat).unsqueeze(1);
  out.cells = at::tensor(cells, at::kLong);
}

}  // namespace

int64_t packed_frames(const AudioConfig& config, int64_t frames) {
  int64_t out = 0;
  for (const int64_t rows : clips_of(config, {0, frames})) out += 2 * rows + 2;
  return out;
}

PackedSounds pack_sounds(const AudioConfig& config, std::span<const SeenSound> sounds,
                         at::Tensor frames, std::span<const int64_t> tokens, int64_t samples,
                         int64_t audio_token, int rank, int ranks, int64_t replicas) {
  MEGATRON_ASSERT(samples > 0 && std::ssize(tokens) % samples == 0, tokens.size(), " tokens of ",
                  samples, " samples");
  const int64_t s = std::ssize(tokens) / samples;
  PackedSounds out;
  out.ranks = replicas > 0 ? 1 : ranks;
  out.all_sounds = std::ssize(sounds);
  std::vector<int64_t> clips;
  std::vector<OwnedFeatures> owned;
  for (const SeenSound& sound : sounds) {
    check_length(config, sound);
    owned.push_back({sound.sample, config.sound_features(sound.frames), sound.owner});
    if (sound.owner != rank) continue;
    ++out.sounds;
    for (const int64_t rows : clips_of(config, sound)) clips.push_back(rows);
  }
  DividedFeatures divided = divide_features(owned, samples, rank, ranks, replicas);
  out.most_features = divided.most;
  out.parts = std::move(divided.parts);
  std::vector<int64_t> places, taken;
  auto sound = sounds.begin();
  for (int64_t i = 0; i < samples; ++i) {
    int64_t features = 0, count = 0;
    for (; sound != sounds.end() && sound->sample == i; ++sound, ++count) {
      const int64_t of_sound = config.sound_features(sound->frames);
      const int64_t begin = divided.first[static_cast<size_t>(sound - sounds.begin())];
      for (int64_t k = 0; k < of_sound; ++k) taken.push_back(begin + k);
      features += of_sound;
    }
    int64_t given = 0;
    for (int64_t j = 0; j < s; ++j)
      if (tokens[static_cast<size_t>(i * s + j)] == audio_token) {
        places.push_back(i * s + j);
        ++given;
      }
    MEGATRON_CHECK(given == features, "sample ", i, " of the micro-batch has ", given,
                   " audio tokens (id ", audio_token, "), its ", count,
                   count == 1 ? " sound has " : " sounds have ", features, " features");
  }
  MEGATRON_ASSERT(sound == sounds.end(), "sounds that are not in the order of their samples");
  int64_t rows = 0;
  for (const int64_t clip : clips) rows += 2 * clip + 2;
  if (frames.defined()) check_shape("frames", frames, {rows, config.audio_mel_bins});
  out.frames = std::move(frames);
  out.places = at::tensor(places, at::kLong);
  if (ranks > 1) out.taken = at::tensor(taken, at::kLong);
  pack_rows(config, clips, out);
  return out;
}

PackedSounds PackedSounds::of_tokens(const at::Tensor& held, int64_t b, int64_t s) const {
  PackedSounds out = *this;
  keep_held(held, b, s, out.places, out.taken);
  return out;
}

PackedSounds PackedSounds::of_rows(int64_t b, int64_t s) const {
  PackedSounds out = *this;
  const auto options = places.options();
  out.places = (at::arange(b, options).mul(s).unsqueeze(1) + places.unsqueeze(0)).flatten();
  out.taken = (taken.defined() ? taken : at::arange(places.size(0), options)).repeat({b});
  return out;
}

PackedSounds to_device(const PackedSounds& sounds, at::Device device) {
  PackedSounds out = sounds;
  for (at::Tensor* tensor : {&out.frames, &out.before, &out.continues, &out.positions, &out.cells,
                             &out.places, &out.taken})
    if (tensor->defined()) *tensor = to_device(*tensor, device);
  out.segments = on_device(sounds.segments, device);
  return out;
}

}  // namespace megatron
