#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/media/detail/exif.h"
#include "megatron/media/image_header.h"
#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

std::string header_error(const std::vector<uint8_t>& file, const MediaLimits& limits = {}) {
  return error_of([&] { read_image_header({file, "x"}, limits); });
}

std::string big_endian(uint32_t value, int bytes) {
  std::string out;
  for (int i = bytes - 1; i >= 0; --i) out += static_cast<char>(value >> 8 * i);
  return out;
}

std::string png_chunk(const std::string& name, const std::string& content) {
  const std::string body = name + content;
  const auto crc = crc32_z(0, reinterpret_cast<const uint8_t*>(body.data()), body.size());
  return big_endian(static_cast<uint32_t>(content.size()), 4) + body +
         big_endian(static_cast<uint32_t>(crc), 4);
}

std::string png_start(uint32_t height, uint32_t width) {
  return "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", big_endian(width, 4) + big_endian(height, 4) +
                                                     std::string("\x08\x02\0\0\0", 5));
}

TEST(ImageHeader, TellsTheSizeThatDecodingGives) {
  for (const GoldenImage& golden : golden_images()) {
    const ImageHeader header = read_image_header(golden.source());
    EXPECT_EQ(header.size().height, golden.facts["height"].get<int64_t>()) << golden.name;
    EXPECT_EQ(header.size().width, golden.facts["width"].get<int64_t>()) << golden.name;
  }
}

TEST(ImageHeader, OtherFormatsAreRefusedByName) {
  using namespace std::string_literals;
  EXPECT_EQ(header_error(bytes_of("GIF89a....")),
            "x: byte 0: GIF is not read; expected JPEG, PNG or WebP");
  EXPECT_THAT(header_error(bytes_of("II*\0\1\2\3\4"s)), HasSubstr("TIFF is not read"));
  EXPECT_THAT(header_error(bytes_of("BM123456")), HasSubstr("BMP is not read"));
  EXPECT_THAT(header_error(bytes_of("\0\0\0\x1c"
                                    "ftypavif"s)),
              HasSubstr("AVIF is not read"));
  EXPECT_THAT(header_error(bytes_of("\0\0\0\x1c"
                                    "ftypheic"s)),
              HasSubstr("HEIF is not read"));
  EXPECT_THAT(header_error(bytes_of("\0\0\0\x0cjP  \r\n\x87\n"s)), HasSubstr("JPEG 2000 is not"));
  EXPECT_THAT(header_error(bytes_of("<svg xmlns=...>")), HasSubstr("SVG is not read"));
  EXPECT_EQ(header_error(bytes_of("hello")), "x: byte 0: neither JPEG, PNG nor WebP");
  EXPECT_EQ(header_error({}), "x: byte 0: the file is empty");
}

TEST(ImageHeader, AnimationsAreRefusedByName) {
  const std::string apng = png_start(1, 1) + png_chunk("acTL", std::string(8, '\0'));
  EXPECT_EQ(header_error(bytes_of(apng)),
            "x: byte 33: animated PNG is not read; expected one image");
  std::string webp("RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\0\0\0\0\0\0", 30);
  EXPECT_EQ(header_error(bytes_of(webp)),
            "x: byte 12: animated WebP is not read; expected one image");
}

TEST(ImageHeader, LimitsComeBeforeMemory) {
  const std::string end = png_chunk("IEND", "");
  EXPECT_EQ(header_error(bytes_of(png_start(100'000, 100'000) + end)),
            "x: byte 0: the image is 100000x100000; expected at most 89,478,485 pixels");
  EXPECT_THAT(header_error(bytes_of(png_start(0xffffffff, 0xffffffff) + end)),
              HasSubstr("the image is 4294967295x4294967295"));
  EXPECT_EQ(header_error(bytes_of(png_start(0, 5) + end)),
            "x: byte 0: the image is 0x5; expected a pixel at least");
  EXPECT_EQ(header_error(bytes_of(png_start(9, 10) + end), {.max_image_pixels = 89}),
            "x: byte 0: the image is 9x10; expected at most 89 pixels");
  EXPECT_EQ(header_error(bytes_of(png_start(9, 10) + end), {.max_file_bytes = 44}),
            "x: byte 0: the file has 45 bytes; expected at most 44");
  std::string chunks;
  for (int i = 0; i < 20'000; ++i) chunks += png_chunk("tEXt", "a");
  EXPECT_THAT(header_error(bytes_of(png_start(1, 1) + chunks + end)),
              HasSubstr("more than 16384 chunks"));
  std::string segments = "\xff\xd8";
  for (int i = 0; i < 20'000; ++i) segments += std::string("\xff\xe5\0\2", 4);
  EXPECT_THAT(header_error(bytes_of(segments)), HasSubstr("more than 16384 segments"));
}

TEST(ImageHeader, WhatIsNotReadIsNamed) {
  using namespace std::string_literals;
  const auto jpeg = [](const std::string& frame) {
    return bytes_of("\xff\xd8" + frame + "\xff\xda\0\2"s);
  };
  EXPECT_THAT(header_error(jpeg("\xff\xc3\0\x0b\x08\0\1\0\1\1"s)), HasSubstr("lossless"));
  EXPECT_EQ(header_error(jpeg("\xff\xc0\0\x0b\x0c\0\1\0\1\1"s)),
            "x: byte 6: samples have 12 bits; expected 8");
  EXPECT_EQ(header_error(jpeg("\xff\xc0\0\x0b\x08\0\1\0\1\2"s)),
            "x: byte 11: the image has 2 components; expected 1, 3 or 4");
  EXPECT_THAT(header_error(bytes_of("\xff\xd8\xff\xe0\0\1"s)), HasSubstr("a JPEG segment of 1"));
  EXPECT_THAT(header_error(bytes_of("\xff\xd8\xff\xd9"s)), HasSubstr("ends before its first scan"));
  EXPECT_THAT(header_error(bytes_of("RIFF\x04\0\0\0WEBP"s)), HasSubstr("the WebP holds no image"));
}

std::vector<uint8_t> exif(const std::string& order, const std::string& entry) {
  return bytes_of("Exif" + std::string(2, '\0') + order + entry);
}

TEST(Orientation, IsReadFromTagsThatSayOne) {
  using namespace std::string_literals;
  const auto value_of = [](const std::vector<uint8_t>& block) {
    media::OrientationTags tags;
    tags.add_exif(block);
    return std::pair(tags.orientation(), tags.bad());
  };
  const std::string little = "II*\0\x08\0\0\0\1\0"s, big = "MM\0*\0\0\0\x08\0\1"s;
  EXPECT_EQ(value_of(exif(little, "\x12\1\3\0\1\0\0\0\6\0\0\0"s)), std::pair(6, false));
  EXPECT_EQ(value_of(exif(big, "\1\x12\0\3\0\0\0\1\0\6\0\0"s)), std::pair(6, false));
  EXPECT_EQ(value_of(exif(big, "\1\x12\0\4\0\0\0\1\0\0\0\6"s)), std::pair(6, false));
  EXPECT_EQ(value_of(exif(little, "\x12\1\3\0\1\0\0\0\x09\0\0\0"s)), std::pair(1, true));
  EXPECT_EQ(value_of(exif(little, "\x12\1\3\0\1\0\0\0\0\0\0\0"s)), std::pair(1, true));
  EXPECT_EQ(value_of(exif(little, "\x12\1\3\0\1\0\0"s)), std::pair(1, true));  // cut
  EXPECT_EQ(value_of(exif("XX*\0\x08\0\0\0\1\0"s, "\x12\1\3\0\1\0\0\0\6\0\0\0"s)),
            std::pair(1, true));
  EXPECT_EQ(value_of(exif("II*\0\xff\xff\xff\xff\1\0"s, "")), std::pair(1, true));
  EXPECT_EQ(value_of(exif(little, "\x13\1\3\0\1\0\0\0\6\0\0\0"s)), std::pair(1, false));  // none
}

TEST(Orientation, OfXmpCountsWhereExifHasNone) {
  media::OrientationTags tags;
  tags.add_xmp("<x tiff:Orientation=\"x\" tiff:Orientation=\"8\"/>");
  EXPECT_EQ(tags.orientation(), 8);
  using namespace std::string_literals;
  tags.add_exif(exif("II*\0\x08\0\0\0\1\0"s, "\x12\1\3\0\1\0\0\0\3\0\0\0"s));
  EXPECT_EQ(tags.orientation(), 3);
}

}  // namespace
}  // namespace megatron
