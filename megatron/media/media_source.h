// Bytes of a medium with the name that messages give it, limits, and the error of bad media.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "megatron/base/check.h"

namespace megatron {

// The bytes of one file, which the caller keeps. `name` is all that the caller knows about the
// place: a path, or "sample 17, shard-0003.tar, cats/1.jpg".
struct MediaSource {
  std::span<const uint8_t> bytes;
  std::string name;
};

// What is accepted. Checked from headers, before memory is asked for.
struct MediaLimits {
  int64_t max_image_pixels = 89'478'485;
  int64_t max_file_bytes = int64_t{64} << 20;
  int max_chunks = 16'384;   // segments of JPEG, chunks of PNG, WebP and WAV
  int max_jpeg_scans = 500;  // of a progressive file
  int64_t max_audio_samples = int64_t{16'000} * 1'800;  // half an hour
};

// A medium that cannot be used. what(): "NAME: byte OFFSET: what was wrong".
class MediaError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] void throw_media_error(const MediaSource& source, int64_t offset,
                                    const std::string& text);

// Throws MediaError if the file is empty or larger than the limit.
void check_file_size(const MediaSource& source, const MediaLimits& limits);

}  // namespace megatron
