#include "megatron/media/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>

#include "megatron/media/detail/pixel_math.h"
#include "megatron/media/resample.h"
#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<int> pixel(const Image& image, int64_t y, int64_t x) {
  const uint8_t* p = image.row(y) + 3 * x;
  return {p[0], p[1], p[2]};
}

TEST(Decode, EveryModeDepthAndOrientationIsPillows) {
  int count = 0;
  for (const GoldenImage& golden : golden_images()) {
    SCOPED_TRACE(golden.name);
    const Image white = decode_image(golden.source());
    const Image drop = decode_image(golden.source(), {.transparency = Transparency::kDrop});
    EXPECT_EQ(white.height(), golden.facts["height"].get<int64_t>());
    EXPECT_EQ(white.width(), golden.facts["width"].get<int64_t>());
    EXPECT_EQ(crc_of(white.bytes()), golden.facts["white"].get<uint32_t>());
    EXPECT_EQ(crc_of(drop.bytes()), golden.facts["drop"].get<uint32_t>());
    ++count;
  }
  EXPECT_GT(count, 100);
}

TEST(Decode, OrientationComesBeforeTheSize) {
  const char* const corners[] = {"RGBW", "GRWB", "WBGR", "BWRG", "RBGW", "BRWG", "WGBR", "GWRB"};
  for (const char* format : {"jpg", "png", "webp"}) {
    for (int orientation = 1; orientation <= 8; ++orientation) {
      const GoldenImage golden = golden_image(cat("quadrants ", orientation, " ", format));
      SCOPED_TRACE(golden.name);
      const ImageHeader header = read_image_header(golden.source());
      EXPECT_EQ(header.orientation, orientation);
      EXPECT_EQ(header.stored, (ImageSize{16, 24}));
      EXPECT_EQ(header.size(), (orientation < 5 ? ImageSize{16, 24} : ImageSize{24, 16}));
      const Image image = decode_image(golden.source());
      EXPECT_EQ(image.size(), header.size());
      std::string found;
      for (const int64_t y : {int64_t{0}, image.height() - 1}) {
        for (const int64_t x : {int64_t{0}, image.width() - 1}) {
          const auto p = pixel(image, y, x);
          found += p[0] > 128 ? (p[1] > 128 ? 'W' : 'R') : (p[1] > 128 ? 'G' : 'B');
        }
      }
      EXPECT_EQ(found, corners[orientation - 1]);
    }
  }
  EXPECT_EQ(read_image_header(golden_image("quadrants xmp jpg").source()).orientation, 6);
  EXPECT_EQ(read_image_header(golden_image("quadrants xmp png").source()).orientation, 6);
}

TEST(Decode, TransparentPixelsLieOverWhiteOrAreTaken) {
  for (const char* name : {"alpha png", "alpha webp"}) {
    const Image white = decode_image(golden_image(name).source());
    EXPECT_EQ(pixel(white, 0, 0), (std::vector{255, 255, 255}));
    EXPECT_EQ(pixel(white, 0, 1), (std::vector{227, 177, 152}));
    EXPECT_EQ(pixel(white, 0, 2), (std::vector{254, 254, 254}));
    const Image drop =
        decode_image(golden_image(name).source(), {.transparency = Transparency::kDrop});
    EXPECT_EQ(pixel(drop, 0, 0), (std::vector{10, 20, 30}));
    EXPECT_EQ(pixel(drop, 0, 1), (std::vector{200, 100, 50}));
    EXPECT_EQ(pixel(drop, 0, 2), (std::vector{0, 0, 0}));
  }
  for (uint32_t c = 0; c < 256; ++c)
    for (uint32_t a = 0; a < 256; ++a)
      ASSERT_EQ(media::over_white(c, a), (2 * (c * a + 255 * (255 - a)) + 255) / 510);
}

TEST(Decode, InksBecomeColours) {
  const auto rgb = [](std::array<uint8_t, 4> inks) {
    std::array<uint8_t, 3> out = {};
    media::cmyk_to_rgb(inks.data(), out.data());
    return out;
  };
  EXPECT_EQ(rgb({0, 0, 0, 0}), (std::array<uint8_t, 3>{255, 255, 255}));
  EXPECT_EQ(rgb({255, 0, 0, 0}), (std::array<uint8_t, 3>{0, 255, 255}));
  EXPECT_EQ(rgb({0, 128, 0, 64}), (std::array<uint8_t, 3>{191, 95, 191}));
}

TEST(Decode, FilesThatAreCutAreNamed) {
  for (const char* name :
       {"quadrants 6 jpg", "quadrants 6 png", "quadrants 6 webp", "progressive"}) {
    const GoldenImage golden = golden_image(name);
    for (size_t size = 0; size < golden.file.size(); ++size) {
      const MediaSource source = {std::span(golden.file).first(size), "sample 3, a.tar: 5.img"};
      EXPECT_THAT(error_of([&] { decode_image(source); }),
                  AllOf(StartsWith("sample 3, a.tar: 5.img: byte "), HasSubstr(": ")))
          << name << " of " << size << " bytes";
    }
  }
  const GoldenImage jpeg = golden_image("progressive");
  EXPECT_THAT(
      error_of([&] { decode_image({std::span(jpeg.file).first(jpeg.file.size() - 2), "a.jpg"}); }),
      AllOf(StartsWith("a.jpg: byte 6"),
            HasSubstr(": JPEG: the file is cut: it ends before its end marker")));
}

TEST(Decode, DamagedDataAreNamed) {
  // Damage that its format can tell: checksums of PNG, codes of JPEG that do not exist.
  GoldenImage png = golden_image("quadrants 1 png");
  const auto data = std::search(png.file.begin(), png.file.end(), "IDAT", "IDAT" + 4);
  data[12] ^= 1;
  EXPECT_THAT(error_of([&] { decode_image({png.file, "a.png"}); }), StartsWith("a.png: byte "));
  GoldenImage jpeg = golden_image("progressive");
  std::fill(jpeg.file.end() - 12, jpeg.file.end() - 2, uint8_t{0xfe});
  EXPECT_THAT(error_of([&] { decode_image({jpeg.file, "a.jpg"}); }),
              AllOf(StartsWith("a.jpg: byte "), HasSubstr("Corrupt JPEG data")));
}

TEST(Decode, ManyScansAreRefused) {
  const GoldenImage golden = golden_image("progressive");
  // The first scan ten thousand times.
  const auto marker_from = [&](auto begin, uint8_t code) {
    const uint8_t marker[] = {0xff, code};
    return std::search(begin, golden.file.end(), marker, marker + 2);
  };
  const auto scan = marker_from(golden.file.begin(), 0xda), tables = marker_from(scan, 0xc4);
  ASSERT_NE(tables, golden.file.end());
  std::vector<uint8_t> file(golden.file.begin(), scan);
  for (int i = 0; i < 10'000; ++i) file.insert(file.end(), scan, tables);
  file.insert(file.end(), tables, golden.file.end());
  EXPECT_THAT(error_of([&] { decode_image({file, "a.jpg"}); }), HasSubstr("too many scans"));
  EXPECT_EQ(
      error_of([&] { decode_image({file, "a.jpg"}, {.limits = {.max_jpeg_scans = 20'000}}); }), "");
}

// A file of the largest size that is allowed, of which a few bytes are there.
TEST(Decode, LargeSizesTakeNoMemoryBeforeTheirData) {
  GoldenImage png = golden_image("quadrants 1 png");
  const auto set = [&](size_t at, uint32_t value) {
    for (int i = 0; i < 4; ++i) png.file[at + i] = static_cast<uint8_t>(value >> (24 - 8 * i));
  };
  set(16, 9000);
  set(20, 9000);
  set(29, static_cast<uint32_t>(crc32_z(0, png.file.data() + 12, 17)));
  rusage before = {}, after = {};
  getrusage(RUSAGE_SELF, &before);
  EXPECT_THAT(error_of([&] { decode_image({png.file, "a.png"}); }),
              AllOf(StartsWith("a.png: byte "), HasSubstr("PNG: ")));
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10) << "KiB of 243 MB of pixels";
}

}  // namespace
}  // namespace megatron
