// From the bytes of a sound file to samples.
#pragma once

#include <vector>

#include "megatron/media/media_source.h"

namespace megatron {

inline constexpr int64_t kSampleRate = 16'000;  // of every encoder that is built

// What the headers say, without decoding and without the library that decodes.
struct SoundHeader {
  int64_t samples = 0;  // of each channel
  int64_t rate = 0;     // a second
  int64_t channels = 0;
};

// WAV (integers and floats), FLAC and Ogg Vorbis, recognised by content. Throws MediaError: other
// formats by name, files that are cut within what is looked at, what is beyond a limit.
SoundHeader read_sound_header(const MediaSource& source, const MediaLimits& limits = {});

// Samples of a file of one channel at 16 kHz; integers of b bits are divided by 2^(b-1). Throws
// MediaError for bad files, other rates and numbers of channels, and files without samples. Loads
// libmegatron_media.so as decode_image() does. Thread safe.
std::vector<float> decode_sound(const MediaSource& source, const MediaLimits& limits = {});

}  // namespace megatron
