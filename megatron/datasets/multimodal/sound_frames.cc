#include "megatron/datasets/multimodal/sound_frames.h"

#include <algorithm>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/media/log_mel.h"
#include "megatron/media/sound.h"

namespace megatron {

SampleSound sample_sound(const MediaRules& rules, const MediumFacts& medium) {
  constexpr int64_t kFrames = kMelClip / kMelHop;
  SampleSound out;
  out.frames = mel_frames(medium.samples);
  out.bins = rules.mel_bins;
  const bool whole = rules.heard == MediaRules::Family::kVoxtral;  // clips of 30 s
  out.clips = whole ? (out.frames + kFrames - 1) / kFrames : 1;
  out.frames_of_clip = whole ? kFrames : (out.frames + 1) / 2 * 2;
  return out;
}

void read_frames(const MediaRules& rules, const MediaSource& source, int64_t samples,
                 const MediaLimits& limits, std::span<float> frames) {
  const std::vector<float> sound = decode_sound(source, limits);
  MEGATRON_CHECK(std::ssize(sound) == samples, source.name, ": decoded to ", sound.size(),
                 " samples, its headers say ", samples);
  const auto bins = static_cast<int>(rules.mel_bins);
  const SampleSound what = sample_sound(rules, {MediaKind::kSound, {}, samples});
  const std::vector<float> read = frame_rows(log_mel(sound, bins), bins, what.frames_of_clip);
  MEGATRON_ASSERT(read.size() == frames.size(), "frames of ", source.name);
  std::ranges::copy(read, frames.begin());
}

}  // namespace megatron
