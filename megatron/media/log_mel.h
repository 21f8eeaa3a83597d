// Whisper's features of sound.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

inline constexpr int64_t kMelHop = 160;       // samples between frames
inline constexpr int64_t kMelWindow = 400;    // samples of a frame
inline constexpr int64_t kMelClip = 480'000;  // samples of a clip, 30 s
inline constexpr int64_t kMelBins = kMelWindow / 2 + 1;

// Slaney's filters of 0 to 8000 Hz, [mels][201].
std::vector<std::array<double, kMelBins>> mel_filters(int mels);

// [mels, 3000 k] of a sound of k begun clips of 30 s, zeros behind: log10 of the power in each
// filter (periodic Hann window, frames centred with reflection, the last one dropped), at least
// 1e-10 and the largest of the sound less 8; then (x + 4) / 4. Throws Error if there are no
// samples.
std::vector<float> log_mel(std::span<const float> samples, int mels);

// What an encoder of sounds reads of clips, of each so many frames (at most 3000): the frames -1 to
// `frames`, [frames + 2, mels], zeros where the clip has none. `mel`: of log_mel().
std::vector<float> frame_rows(std::span<const float> mel, int mels, int64_t frames);

// Frames that show any of n samples.
int64_t mel_frames(int64_t samples);

// Tokens that a clip of so many frames becomes in Qwen 2 Audio; may be 0.
int64_t qwen2_audio_tokens(int64_t frames);
// Tokens of n samples in Voxtral, which takes them in clips of 30 s.
int64_t voxtral_tokens(int64_t samples);

}  // namespace megatron
