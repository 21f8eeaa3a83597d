#include "megatron/media/detail/media_library.h"

#include <cstdlib>

#include "megatron/base/loading/shared_object.h"

namespace megatron::media {
namespace {

MediaLibrary load() {
  std::vector<std::filesystem::path> paths = paths_beside_program(kMediaLibrary);
  if (const char* given = std::getenv("MEGATRON_MEDIA_LIBRARY")) paths = {given};
  const SharedObject library(kMediaLibrary, paths, "images and sound need",
                             "install libjpeg-turbo, libpng, libwebp and libsndfile with their "
                             "development files (`make setup` does) and build again");
  MediaLibrary out;
  library.resolve("megatron_media_read_jpeg", out.read_jpeg);
  library.resolve("megatron_media_read_png", out.read_png);
  library.resolve("megatron_media_read_webp", out.read_webp);
  library.resolve("megatron_media_read_sound", out.read_sound);
  return out;
}

}  // namespace

const MediaLibrary& media_library() {
  static const MediaLibrary loaded = load();
  return loaded;
}

}  // namespace megatron::media
