#include "megatron/media/pixel_values.h"

#include <gtest/gtest.h>

#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

TEST(PixelValues, AreThoseOfTransformers) {
  const PixelTable clip = pixel_table(kClipScaling);
  EXPECT_EQ(clip[0][0], -1.7922625541687012f);
  EXPECT_EQ(clip[0][1], -1.777664065361023f);
  EXPECT_EQ(clip[0][128], 0.07633614540100098f);
  EXPECT_EQ(clip[0][255], 1.9303361177444458f);
  EXPECT_EQ(clip[1][0], -1.7520971298217773f);
  EXPECT_EQ(clip[1][255], 2.0748836994171143f);
  EXPECT_EQ(clip[2][0], -1.480219841003418f);
  EXPECT_EQ(clip[2][255], 2.1458969116210938f);
}

TEST(PixelValues, EveryBitOfTheTablesIsRight) {
  const auto crc = [](const PixelScaling& scaling) {
    const PixelTable table = pixel_table(scaling);
    return crc_of({reinterpret_cast<const uint8_t*>(table.data()), sizeof table});
  };
  EXPECT_EQ(crc(kClipScaling), 0x88a84fb3u);
  EXPECT_EQ(crc(PixelScaling{}), 0x958a2463u);
  EXPECT_EQ(crc(kImageNetScaling), 0xbd18b1b8u);
}

}  // namespace
}  // namespace megatron
