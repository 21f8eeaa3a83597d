// The functions of libmegatron_media.so, which is loaded by the first call.
#pragma once

#include "megatron/media/library/media_api.h"

namespace megatron::media {

struct MediaLibrary {
  decltype(&megatron_media_read_jpeg) read_jpeg = nullptr;
  decltype(&megatron_media_read_png) read_png = nullptr;
  decltype(&megatron_media_read_webp) read_webp = nullptr;
  decltype(&megatron_media_read_sound) read_sound = nullptr;
};

// Throws Error with a hint if the library was not built or cannot be loaded. Looked for in
// $MEGATRON_MEDIA_LIBRARY (a path), beside the program and in ../lib of it.
const MediaLibrary& media_library();

}  // namespace megatron::media
