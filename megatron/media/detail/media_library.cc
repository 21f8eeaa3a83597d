#include "megatron/media/detail/media_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "megatron/base/check.h"

namespace megatron::media {
namespace {

namespace fs = std::filesystem;

template <class Function>
void resolve(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  MEGATRON_CHECK(function != nullptr, kMediaLibrary, " has no function ", name,
                 "\nhint: it belongs to another build; build again");
}

std::vector<fs::path> library_paths() {
  if (const char* given = std::getenv("MEGATRON_MEDIA_LIBRARY")) return {given};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  return {program.parent_path() / kMediaLibrary,
          program.parent_path() / ".." / "lib" / kMediaLibrary};
}

MediaLibrary load() {
  std::string reasons;
  for (const fs::path& path : library_paths()) {
    void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const std::string reason = ::dlerror();
      if (fs::exists(path)) reasons += "\ndetail: " + reason;
      continue;
    }
    MediaLibrary out;
    resolve(handle, "megatron_media_read_jpeg", out.read_jpeg);
    resolve(handle, "megatron_media_read_png", out.read_png);
    resolve(handle, "megatron_media_read_webp", out.read_webp);
    resolve(handle, "megatron_media_read_sound", out.read_sound);
    return out;
  }
  throw_error(cat("images and sound need ", kMediaLibrary,
                  ", which was not built or cannot be loaded", reasons,
                  "\nhint: install libjpeg-turbo, libpng, libwebp and libsndfile with their "
                  "development files (`make setup` does) and build again"));
}

}  // namespace

const MediaLibrary& media_library() {
  static const MediaLibrary loaded = load();
  return loaded;
}

}  // namespace megatron::media
