// Sound by libsndfile.
#include <sndfile.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "megatron/media/library/media_api.h"

namespace {

// A file in memory.
struct MemoryFile {
  const uint8_t* data;
  sf_count_t bytes;
  sf_count_t at;
};

sf_count_t file_size(void* file) { return static_cast<MemoryFile*>(file)->bytes; }
sf_count_t file_place(void* file) { return static_cast<MemoryFile*>(file)->at; }
sf_count_t file_seek(sf_count_t offset, int whence, void* user) {
  auto& file = *static_cast<MemoryFile*>(user);
  const sf_count_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? file.at : file.bytes;
  file.at = std::clamp<sf_count_t>(base + offset, 0, file.bytes);
  return file.at;
}
sf_count_t file_read(void* to, sf_count_t count, void* user) {
  auto& file = *static_cast<MemoryFile*>(user);
  count = std::clamp<sf_count_t>(count, 0, file.bytes - file.at);
  std::memcpy(to, file.data + file.at, static_cast<size_t>(count));
  file.at += count;
  return count;
}
sf_count_t file_write(const void*, sf_count_t, void*) { return 0; }

bool fail(MegatronMediaFault* fault, int64_t offset, const char* text) {
  fault->offset = offset;
  std::snprintf(fault->text, sizeof fault->text, "%s", text);
  fault->text[std::strcspn(fault->text, "\n")] = 0;
  return false;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) bool megatron_media_read_sound(
    const MegatronSoundRequest* request, MegatronMediaFault* fault) {
  SF_VIRTUAL_IO calls = {file_size, file_seek, file_read, file_write, file_place};
  MemoryFile file = {request->data, request->bytes, 0};
  SF_INFO info = {};
  SNDFILE* const sound = sf_open_virtual(&calls, SFM_READ, &info, &file);
  if (sound == nullptr) return fail(fault, file.at, sf_strerror(nullptr));
  bool good = false;
  if (info.channels != 1 || info.samplerate != request->rate || info.frames != request->samples) {
    fail(fault, file.at, "another length, rate or number of channels than the header's");
  } else {
    good = sf_readf_float(sound, request->out, info.frames) == info.frames;
    if (sf_error(sound) != SF_ERR_NO_ERROR) {
      good = fail(fault, file.at, sf_strerror(sound));
    } else if (!good) {
      fail(fault, file.at, "the file is cut");
    }
  }
  sf_close(sound);
  return good;
}
