// The files of tests/golden/media/images.json.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/media/image.h"
#include "megatron/media/media_source.h"

namespace megatron {

struct GoldenImage {
  std::string name;
  std::vector<uint8_t> file;
  nlohmann::json facts;
  MediaSource source() const { return {file, name}; }
};

inline std::vector<uint8_t> bytes_of_base64(const std::string& text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<uint8_t> out;
  uint32_t bits = 0;
  int waiting = 0;
  for (const char digit : text.substr(0, text.find('='))) {
    bits = bits << 6 | static_cast<uint32_t>(kDigits.find(digit));
    waiting += 6;
    if (waiting < 8) continue;
    waiting -= 8;
    out.push_back(static_cast<uint8_t>(bits >> waiting));
  }
  return out;
}

inline std::vector<GoldenImage> golden_images() {
  const auto rows = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/images.json"));
  std::vector<GoldenImage> out;
  for (const auto& row : rows)
    out.push_back({row.at("name"), bytes_of_base64(row.at("file")), row});
  return out;
}

inline GoldenImage golden_image(const std::string& name) {
  for (GoldenImage& image : golden_images())
    if (image.name == name) return image;
  throw_error("no image " + name);
}

inline uint32_t crc_of(std::span<const uint8_t> bytes) {
  return static_cast<uint32_t>(crc32_z(0, bytes.data(), bytes.size()));
}

}  // namespace megatron
