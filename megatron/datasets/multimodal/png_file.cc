// Source: W3C, Portable Network Graphics (PNG) Specification (Third Edition).
#include "megatron/datasets/multimodal/png_file.h"

#include <zlib.h>

#include <cstdint>

#include "megatron/base/check.h"

namespace megatron {
namespace {

std::string big_endian(uint32_t value) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 0xff);
  return out;
}

std::string chunk(const std::string& type, const std::string& data) {
  const std::string body = type + data;
  const auto crc =
      static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(body.data()), body.size()));
  return big_endian(static_cast<uint32_t>(data.size())) + body + big_endian(crc);
}

}  // namespace

std::string png_bytes(const Image& image) {
  std::string rows;
  rows.reserve(static_cast<size_t>(image.height() * (image.row_bytes() + 1)));
  for (int64_t y = 0; y < image.height(); ++y) {
    rows += '\0';  // not filtered
    rows.append(reinterpret_cast<const char*>(image.row(y)),
                static_cast<size_t>(image.row_bytes()));
  }
  uLongf size = compressBound(rows.size());
  std::string packed(size, '\0');
  MEGATRON_CHECK(compress2(reinterpret_cast<Bytef*>(packed.data()), &size,
                           reinterpret_cast<const Bytef*>(rows.data()), rows.size(), 6) == Z_OK,
                 "a picture of ", rows.size(), " bytes could not be compressed");
  packed.resize(size);
  const std::string header = big_endian(static_cast<uint32_t>(image.width())) +
                             big_endian(static_cast<uint32_t>(image.height())) +
                             std::string("\x08\x02\x00\x00\x00", 5);
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("IDAT", packed) + chunk("IEND", "");
}

}  // namespace megatron
