// C interface of the shared library megatron_media.
#pragma once

#include <cstdint>

namespace megatron {

inline constexpr const char* kMediaLibrary = "libmegatron_media.so";

}  // namespace megatron

extern "C" {

struct MegatronImageRequest {
  const uint8_t* data;  // the file
  int64_t bytes;
  int32_t height;  // what the caller read from the header; another size is an error
  int32_t width;
  bool over_white;    // pixels that are not opaque are laid over white; else alpha is ignored
  int32_t max_scans;  // of a progressive JPEG
  uint8_t* out;       // [height, width, 3]
};

struct MegatronSoundRequest {
  const uint8_t* data;  // the file
  int64_t bytes;
  int64_t samples;  // what the caller read from the header; another number or rate is an error
  int32_t rate;
  float* out;  // [samples], of one channel
};

struct MegatronMediaFault {
  int64_t offset;  // of the file, about where reading stopped
  char text[200];
};

// Each fills `out` and returns true, or fills `fault` and returns false.
bool megatron_media_read_jpeg(const MegatronImageRequest* request, MegatronMediaFault* fault);
bool megatron_media_read_png(const MegatronImageRequest* request, MegatronMediaFault* fault);
bool megatron_media_read_webp(const MegatronImageRequest* request, MegatronMediaFault* fault);
bool megatron_media_read_sound(const MegatronSoundRequest* request, MegatronMediaFault* fault);
}
