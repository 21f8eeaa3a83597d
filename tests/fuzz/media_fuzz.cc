// For any bytes, an image or a sound is read or refused with a MediaError that names it, its byte
// and the reason; what is read has the size that its header told. The corpus are the small files of
// tests/golden/media. A run is 3,000 images and 2,000 sounds, or MEGATRON_FUZZ_SECONDS for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>

#include "megatron/media/decode.h"
#include "megatron/media/image_processor.h"
#include "megatron/media/sound.h"
#include "tests/fuzz/repeat.h"
#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using Bytes = std::vector<uint8_t>;

class MediaFuzz : public ::testing::Test {
 protected:
  size_t below(size_t limit) { return random_() % limit; }

  // A number of 1 to 4 bytes in either order, often at an edge of its range.
  void set_number(Bytes& bytes, size_t at) {
    constexpr std::array<uint32_t, 9> kEdges = {0,      1,      255,        256,       65'500,
                                                0xffff, 0x7fff, 0x7fffffff, 0xffffffff};
    const auto value =
        below(3) == 0 ? static_cast<uint32_t>(random_()) : kEdges[below(kEdges.size())];
    const size_t size = 1 + below(4);
    const bool big = below(2) == 0;
    for (size_t i = 0; i < size && at + i < bytes.size(); ++i)
      bytes[at + i] = static_cast<uint8_t>(value >> 8 * (big ? size - 1 - i : i));
  }

  Bytes mutated(Bytes bytes) {
    for (size_t edits = below(5); edits > 0 && !bytes.empty(); --edits) {
      // Mostly where the headers are.
      const size_t at = below(below(3) == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 200));
      const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
      const auto some = [&] {
        const size_t length = std::min(1 + below(40), bytes.size() - at);
        return Bytes(place, place + static_cast<std::ptrdiff_t>(length));
      };
      switch (below(6)) {
        case 0:
          bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << below(8));
          break;
        case 1:
          set_number(bytes, at);
          break;
        case 2:
          bytes.erase(place, place + static_cast<std::ptrdiff_t>(some().size()));
          break;
        case 3: {
          const Bytes piece = some();
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size())),
                       piece.begin(), piece.end());
          break;
        }
        case 4:
          bytes.resize(at);
          break;
        default:
          bytes[at] = static_cast<uint8_t>(random_());
      }
    }
    repair_checksums(bytes);
    return bytes;
  }

  // Those of PNG chunks, most of the time: else nothing behind them is reached.
  void repair_checksums(Bytes& bytes) {
    if (bytes.size() < 8 || bytes[1] != 'P' || below(4) == 0) return;
    for (size_t at = 8; at + 12 <= bytes.size();) {
      size_t length = 0;
      for (size_t i = 0; i < 4; ++i) length = length << 8 | bytes[at + i];
      if (length > bytes.size() - at - 12) return;
      const uint32_t crc = crc_of(std::span(bytes).subspan(at + 4, length + 4));
      for (size_t i = 0; i < 4; ++i)
        bytes[at + 8 + length + i] = static_cast<uint8_t>(crc >> (24 - 8 * i));
      at += length + 12;
    }
  }

  // Counts what is read; anything but a MediaError in its form fails.
  void expect_read_or_refused(const std::function<void()>& read) {
    try {
      read();
      ++read_;
    } catch (const MediaError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("sample 7: byte ")) << error.what();
      EXPECT_FALSE(holds_address(error.what())) << error.what();
      ++refused_;
    }
  }

  std::mt19937 random_;
  int read_ = 0, refused_ = 0;
};

TEST_F(MediaFuzz, Images) {
  const auto corpus = golden_images();
  const MediaLimits limits = {.max_image_pixels = 1 << 20};
  repeat_with_seeds(3000, [&](uint32_t seed) {
    random_.seed(seed);
    const Bytes file = mutated(corpus[below(corpus.size())].file);
    const MediaSource source = {file, "sample 7"};
    const auto transparency = below(2) == 0 ? Transparency::kWhite : Transparency::kDrop;
    expect_read_or_refused([&] {
      const ImageHeader header = read_image_header(source, limits);
      const Image image = decode_image(source, {limits, transparency});
      EXPECT_EQ(image.size(), header.size());
    });
  });
  EXPECT_GT(read_, 100);
  EXPECT_GT(refused_, 100);
}

TEST_F(MediaFuzz, Sounds) {
  std::vector<Bytes> corpus;
  const auto sounds = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/sounds.json"));
  for (const auto& row : sounds.at("files")) corpus.push_back(bytes_of_base64(row.at("file")));
  repeat_with_seeds(2000, [&](uint32_t seed) {
    random_.seed(seed);
    const Bytes file = mutated(corpus[below(corpus.size())]);
    const MediaSource source = {file, "sample 7"};
    const MediaLimits limits = {.max_audio_samples = 1 << 20};
    expect_read_or_refused([&] {
      const SoundHeader header = read_sound_header(source, limits);
      EXPECT_EQ(std::ssize(decode_sound(source, limits)), header.samples);
    });
  });
  EXPECT_GT(read_, 100);
  EXPECT_GT(refused_, 100);
}

// Sizes and configurations at the edges of what a processor accepts: a plan is made or refused.
TEST_F(MediaFuzz, Processors) {
  const auto rows = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/processors.json"));
  repeat_with_seeds(2000, [&](uint32_t seed) {
    random_.seed(seed);
    const std::string text = rows[below(rows.size())].at("config").dump();
    const Bytes bytes = mutated(Bytes(text.begin(), text.end()));
    const auto side = [&] { return 1 + static_cast<int64_t>(below(below(2) == 0 ? 40 : 9000)); };
    try {
      const auto config =
          read_image_processor({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, "p");
      const ImagePlan plan = plan_image(config, {side(), side()});
      EXPECT_FALSE(plan.pictures.empty());
      for (const PicturePlan& picture : plan.pictures) {
        EXPECT_LE(picture.keep.top + picture.keep.size.height, picture.resized.height);
        EXPECT_LE(picture.keep.left + picture.keep.size.width, picture.resized.width);
        EXPECT_LE(picture.top + picture.keep.size.height, picture.size.height);
        EXPECT_LE(picture.left + picture.keep.size.width, picture.size.width);
      }
      ++read_;
    } catch (const Error&) {
      ++refused_;
    }
  });
  EXPECT_GT(read_, 100);
  EXPECT_GT(refused_, 100);
}

}  // namespace
}  // namespace megatron
