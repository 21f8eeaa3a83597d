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

inline std::vector<uint8_t> bytes_of_hex(const std::string& hex) {
  std::vector<uint8_t> out;
  for (size_t i = 0; i < hex.size(); i += 2)
    out.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

inline std::vector<GoldenImage> golden_images() {
  const auto rows = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/images.json"));
  std::vector<GoldenImage> out;
  for (const auto& row : rows) out.push_back({row.at("name"), bytes_of_hex(row.at("file")), row});
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
