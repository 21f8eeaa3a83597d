#include "megatron/media/detail/exif.h"

#include <string>

namespace megatron::media {
namespace {

constexpr uint32_t kOrientation = 0x0112;

// A TIFF block in either byte order; nothing where it ends too early.
class Tiff {
 public:
  explicit Tiff(std::span<const uint8_t> block) : block_(block) {}

  bool open() {
    if (block_.size() < 8) return false;
    big_ = block_[0] == 'M' && block_[1] == 'M';
    if (!big_ && !(block_[0] == 'I' && block_[1] == 'I')) return false;
    return number(2, 2) == 42u;
  }
  std::optional<uint32_t> number(size_t offset, size_t count) const {
    if (offset > block_.size() || count > block_.size() - offset) return std::nullopt;
    uint32_t value = 0;
    for (size_t i = 0; i < count; ++i)
      value = value << 8 | block_[offset + (big_ ? i : count - 1 - i)];
    return value;
  }

 private:
  std::span<const uint8_t> block_;
  bool big_ = false;
};

}  // namespace

void OrientationTags::add_exif(std::span<const uint8_t> block) {
  constexpr std::string_view kPrefix("Exif\0\0", 6);
  while (block.size() >= kPrefix.size() &&
         std::string_view(reinterpret_cast<const char*>(block.data()), kPrefix.size()) == kPrefix)
    block = block.subspan(kPrefix.size());
  if (exif_ || block.empty()) return;
  Tiff tiff(block);
  bad_exif_ = true;
  if (!tiff.open()) return;
  const size_t directory = *tiff.number(4, 4);
  const auto entries = tiff.number(directory, 2);
  if (!entries) return;
  for (size_t i = 0; i < *entries; ++i) {
    const size_t entry = directory + 2 + 12 * i;
    const auto tag = tiff.number(entry, 2), type = tiff.number(entry + 2, 2),
               count = tiff.number(entry + 4, 4), value = tiff.number(entry + 8, 4);
    if (!value) return;
    if (*tag != kOrientation) continue;
    const size_t bytes = *type == 1 ? 1 : *type == 3 ? 2 : *type == 4 ? 4 : 0;
    if (bytes == 0 || *count != 1) return;
    exif_ = *tiff.number(entry + 8, bytes);
    break;
  }
  bad_exif_ = false;
}

void OrientationTags::add_xmp(std::string_view packet) {
  constexpr std::string_view kTag = "tiff:Orientation";
  for (size_t at = packet.find(kTag); at != packet.npos; at = packet.find(kTag, at + 1)) {
    std::string_view rest = packet.substr(at + kTag.size());
    if (rest.starts_with("=\"")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with(">")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    if (rest.empty() || rest[0] < '0' || rest[0] > '9') continue;
    xmp_ = static_cast<uint32_t>(rest[0] - '0');
    return;
  }
}

int OrientationTags::orientation() const {
  const uint32_t value = exif_ ? *exif_ : xmp_.value_or(1);
  return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
}

bool OrientationTags::bad() const {
  if (exif_) return *exif_ < 1 || *exif_ > 8;
  return bad_exif_ || (xmp_ && (*xmp_ < 1 || *xmp_ > 8));
}

}  // namespace megatron::media
