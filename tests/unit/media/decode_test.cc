#include "megatron/media/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

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

// WebP has no checksums: a flipped bit is named, or gives other pixels of the size that the header
// says.
TEST(Decode, FlippedBitsOfWebpAreNamedOrRead) {
  const MediaLimits limits = {.max_image_pixels = 1 << 20};
  int read = 0, refused = 0;
  for (const char* name : {"alpha webp", "quadrants 6 webp"}) {
    const GoldenImage golden = golden_image(name);
    for (size_t bit = 0; bit < 8 * golden.file.size(); bit += 3) {
      std::vector<uint8_t> file = golden.file;
      file[bit / 8] = static_cast<uint8_t>(file[bit / 8] ^ 1 << bit % 8);
      const MediaSource source = {file, "a.webp"};
      const std::string error = error_of([&] {
        EXPECT_EQ(decode_image(source, {.limits = limits}).size(),
                  read_image_header(source, limits).size());
      });
      EXPECT_TRUE(error.empty() || error.starts_with("a.webp: byte ")) << bit << " " << error;
      ++(error.empty() ? read : refused);
    }
  }
  EXPECT_GT(read, 20);
  EXPECT_GT(refused, 20);
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

// Files of nearly the largest size that is allowed, of which few bytes are there.
TEST(Decode, LargeSizesTakeNoMemoryBeforeTheirData) {
  const auto set = [](std::vector<uint8_t>& file, size_t at, int bytes, uint32_t value) {
    for (int i = 0; i < bytes; ++i)
      file[at + i] = static_cast<uint8_t>(value >> 8 * (bytes - 1 - i));
  };
  std::vector<GoldenImage> files;
  for (const bool interlaced : {false, true}) {
    files.push_back(golden_image("quadrants 1 png"));
    std::vector<uint8_t>& png = files.back().file;
    set(png, 16, 4, 9000);
    set(png, 20, 4, 9000);
    png[28] = interlaced;
    set(png, 29, 4, static_cast<uint32_t>(crc32_z(0, png.data() + 12, 17)));
  }
  files.push_back(golden_image("progressive"));
  std::vector<uint8_t>& jpeg = files.back().file;
  const uint8_t frame[] = {0xff, 0xc2};
  const auto at = std::search(jpeg.begin(), jpeg.end(), frame, frame + 2) - jpeg.begin();
  set(jpeg, at + 5, 2, 1366);
  set(jpeg, at + 7, 2, 65'500);
  for (const GoldenImage& file : files) {
    rusage before = {}, after = {};
    getrusage(RUSAGE_SELF, &before);
    EXPECT_THAT(error_of([&] { decode_image({file.file, "a"}); }), StartsWith("a: byte "));
    getrusage(RUSAGE_SELF, &after);
    EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 256 << 10) << "KiB, " << file.name;
  }
}

// A WebP whose two headers tell two sizes.
TEST(Decode, TheSizeOfTheHeaderIsThatOfThePixels) {
  GoldenImage webp = golden_image("alpha webp");
  std::vector<uint8_t>& file = webp.file;
  const std::string wide("VP8X\x0a\0\0\0\x10\0\0\0\x07\0\0\x05\0\0", 18);
  if (std::string(file.begin() + 12, file.begin() + 16) == "VP8X")
    file.erase(file.begin() + 12, file.begin() + 30);
  file.insert(file.begin() + 12, wide.begin(), wide.end());
  const auto length = static_cast<uint32_t>(file.size() - 8);
  for (int i = 0; i < 4; ++i) file[4 + i] = static_cast<uint8_t>(length >> 8 * i);
  EXPECT_EQ(read_image_header({file, "a"}).size(), (ImageSize{6, 8}));
  EXPECT_THAT(error_of([&] { decode_image({file, "a.webp"}); }),
              StartsWith("a.webp: byte 0: WebP: "));
}

// In a process of its own, for the library is loaded once.
TEST(DecodeDeathTest, AMissingLibraryIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("MEGATRON_MEDIA_LIBRARY", "/nowhere/libmegatron_media.so", 1);
        const std::string error =
            error_of([] { decode_image(golden_image("progressive").source()); });
        std::fputs(error.c_str(), stderr);
        std::exit(read_image_header(golden_image("progressive").source()).size().width == 24 ? 3
                                                                                             : 4);
      },
      ::testing::ExitedWithCode(3),
      "images and sound need libmegatron_media.so, which was not built or cannot be loaded");
}

}  // namespace
}  // namespace megatron
