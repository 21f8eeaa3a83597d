#include "megatron/datasets/multimodal/image_patches.h"

#include <algorithm>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/media/decode.h"

namespace megatron {

int64_t image_patches(const MediaRules& rules, const MediumFacts& medium) {
  if (medium.kind != MediaKind::kImage) return 0;
  int64_t out = 0;
  for (const PicturePlan& picture : plan_image(rules.processor, medium.size).pictures)
    out += picture.size.height / rules.patch * (picture.size.width / rules.patch);
  return out;
}

SampleImage sample_image(const MediaRules& rules, const MediumFacts& medium) {
  const ImagePlan plan = plan_image(rules.processor, medium.size);
  const ImageSize picture = plan.pictures.front().size;
  return {.rows = picture.height / rules.patch,
          .columns = picture.width / rules.patch,
          .pictures = std::ssize(plan.pictures),
          .patch_bytes = 3 * rules.frames() * rules.patch * rules.patch,
          .grid = plan.grid,
          .size = medium.size};
}

void read_patches(const MediaRules& rules, const MediaSource& source, ImageSize size,
                  const MediaLimits& limits, std::span<uint8_t> patches) {
  const Image pixels = decode_image(source, {.limits = limits});
  MEGATRON_CHECK(pixels.size() == size, source.name, ": decoded to ", pixels.height(), "x",
                 pixels.width(), ", its headers say ", size.height, "x", size.width);
  for (const Image& picture : process_image(rules.processor, pixels)) {
    const std::vector<uint8_t> cut =
        patch_bytes(picture, rules.patch, rules.block(), rules.frames());
    MEGATRON_ASSERT(cut.size() <= patches.size(), "more pictures than the plan of ", source.name);
    std::copy(cut.begin(), cut.end(), patches.begin());
    patches = patches.subspan(cut.size());
  }
  MEGATRON_ASSERT(patches.empty(), "fewer pictures than the plan of ", source.name);
}

}  // namespace megatron
