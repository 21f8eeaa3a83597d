// Headers of sound files.
#include "megatron/base/format.h"
#include "megatron/media/detail/header_walk.h"
#include "megatron/media/sound.h"

namespace megatron {
namespace {

using media::Bytes;
using namespace std::string_view_literals;

SoundHeader read_wav(const Bytes& file, const MediaLimits& limits) {
  constexpr uint32_t kIntegers = 1, kFloats = 3, kExtensible = 0xfffe;
  SoundHeader header;
  int64_t frame_bytes = 0;
  int64_t at = 12;
  for (int chunks = 1;; ++chunks) {
    if (chunks > limits.max_chunks) file.fail(at, cat("more than ", limits.max_chunks, " chunks"));
    const int64_t length = file.little_endian(at + 4, 4), content = at + 8;
    if (file.has(at, "fmt ")) {
      uint32_t kind = file.little_endian(content, 2);
      if (kind == kExtensible) kind = file.little_endian(content + 24, 2);
      if (kind != kIntegers && kind != kFloats)
        file.fail(content, cat("WAV of kind ", kind, " is not read; expected integers or floats"));
      header.channels = file.little_endian(content + 2, 2);
      header.rate = file.little_endian(content + 4, 4);
      frame_bytes = file.little_endian(content + 12, 2);
    } else if (file.has(at, "data")) {
      if (length > file.size() - content)
        file.fail(file.size(), cat("the file is cut: it ends within its ", length,
                                   " bytes of samples, which begin at ", content));
      if (frame_bytes == 0) file.fail(at, "samples come before a description of them");
      header.samples = length / frame_bytes;
      return header;
    }
    file.range(content, length);
    at = content + length + (length & 1);
  }
}

SoundHeader read_flac(const Bytes& file) {
  // The block STREAMINFO comes first: 20 bits of rate, 3 of channels, 5 of bits, 36 of samples.
  if (file.big_endian(4, 1) << 1 & 0xff) file.fail(4, "the block STREAMINFO is expected here");
  const uint32_t first = file.big_endian(18, 4);
  const int64_t samples = static_cast<int64_t>(first & 0xf) << 32 | file.big_endian(22, 4);
  if (samples == 0) file.fail(18, "the FLAC does not tell its number of samples");
  return {samples, first >> 12, (first >> 9 & 7) + 1};
}

SoundHeader read_ogg(const Bytes& file, const MediaLimits& limits) {
  constexpr uint32_t kLast = 0x04;
  if (file.has(28, "OpusHead")) file.fail(28, "Ogg Opus is not read; expected Ogg Vorbis");
  if (!file.has(28, "\x01vorbis")) file.fail(28, "Ogg of another kind than Vorbis is not read");
  SoundHeader header{.rate = file.little_endian(40, 4), .channels = file.big_endian(39, 1)};
  int64_t at = 0;
  for (int64_t pages = 1;; ++pages) {
    if (pages > limits.max_file_bytes / 27) file.fail(at, "too many pages");
    if (!file.has(at, "OggS")) file.fail(at, "an Ogg page is expected here");
    const uint32_t flags = file.big_endian(at + 5, 1);
    const int64_t position =
        static_cast<int64_t>(file.little_endian(at + 10, 4)) << 32 | file.little_endian(at + 6, 4);
    const int64_t segments = file.big_endian(at + 26, 1);
    int64_t length = 0;
    for (const uint8_t size : file.range(at + 27, segments)) length += size;
    file.range(at + 27 + segments, length);
    if (position > header.samples) header.samples = position;
    if (flags & kLast) return header;
    at += 27 + segments + length;
  }
}

SoundHeader read_known(const Bytes& file, const MediaLimits& limits) {
  if (file.has(0, "RIFF") && file.has(8, "WAVE")) return read_wav(file, limits);
  if (file.has(0, "fLaC")) return read_flac(file);
  if (file.has(0, "OggS")) return read_ogg(file, limits);
  const std::pair<int64_t, std::pair<std::string_view, const char*>> others[] = {
      {0, {"ID3"sv, "MP3"}},
      {0, {"\xff\xfb"sv, "MP3"}},
      {0, {"\xff\xf1"sv, "AAC"}},
      {4, {"ftyp"sv, "MP4 (M4A)"}},
      {0, {"\x1a\x45\xdf\xa3"sv, "Matroska (WebM)"}},
      {0, {"FORM"sv, "AIFF"}},
      {0, {"RF64"sv, "RF64"}},
      {0, {"caff"sv, "CAF"}}};
  for (const auto& [offset, other] : others)
    if (file.has(offset, other.first))
      file.fail(0, cat(other.second, " is not read; expected WAV, FLAC or Ogg Vorbis"));
  file.fail(0, "neither WAV, FLAC nor Ogg Vorbis");
}

}  // namespace

SoundHeader read_sound_header(const MediaSource& source, const MediaLimits& limits) {
  check_file_size(source, limits);
  const Bytes file(source);
  const SoundHeader header = read_known(file, limits);
  if (header.samples > limits.max_audio_samples)
    file.fail(0, cat("the sound has ", format_count(static_cast<uint64_t>(header.samples)),
                     " samples; expected at most ",
                     format_count(static_cast<uint64_t>(limits.max_audio_samples))));
  return header;
}

}  // namespace megatron
