#include "megatron/media/resample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "megatron/media/decode.h"
#include "megatron/media/detail/resample_passes.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

// Gray samples as a row.
Image row_of(const std::vector<int>& values) {
  Image image({1, static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i)
    for (int c = 0; c < 3; ++c) image.row(0)[3 * i + c] = static_cast<uint8_t>(values[i]);
  return image;
}

std::vector<int> channel(const Image& image, int64_t y, int channel) {
  std::vector<int> out;
  for (int64_t x = 0; x < image.width(); ++x) out.push_back(image.row(y)[3 * x + channel]);
  return out;
}

int sum_of(const Image& image) {
  return std::accumulate(image.bytes().begin(), image.bytes().end(), 0);
}

Image random_image(std::mt19937& generator, ImageSize size) {
  Image image(size);
  for (uint8_t& byte : image.bytes()) byte = static_cast<uint8_t>(generator());
  return image;
}

bool same(const Image& a, const Image& b) {
  return a.size() == b.size() && std::equal(a.bytes().begin(), a.bytes().end(), b.bytes().begin());
}

TEST(Resample, RowsArePillows) {
  const Image row = row_of({0, 255, 0, 0, 255, 255, 0, 128});
  const auto to = [&](int64_t width, Resampling filter) {
    return channel(resized(row, {1, width}, filter), 0, 1);
  };
  using V = std::vector<int>;
  EXPECT_EQ(to(3, Resampling::kBicubic), (V{90, 131, 124}));
  EXPECT_EQ(to(3, Resampling::kBilinear), (V{101, 128, 118}));
  EXPECT_EQ(to(5, Resampling::kBicubic), (V{109, 62, 128, 197, 68}));
  EXPECT_EQ(to(5, Resampling::kBilinear), (V{104, 66, 128, 189, 76}));
  EXPECT_EQ(to(13, Resampling::kBicubic),
            (V{0, 109, 254, 89, 0, 0, 128, 255, 255, 171, 3, 67, 137}));
  EXPECT_EQ(to(13, Resampling::kBilinear),
            (V{0, 108, 245, 88, 0, 0, 128, 255, 255, 167, 10, 74, 128}));
}

TEST(Resample, ImagesArePillows) {
  Image image({5, 7});
  for (int y = 0; y < 5; ++y)
    for (int x = 0; x < 7; ++x)
      for (int c = 0; c < 3; ++c)
        image.row(y)[3 * x + c] = static_cast<uint8_t>(((y * 7 + x) * 3 + c) * 37 % 251);
  using V = std::vector<int>;
  const Image small = resized(image, {2, 3}, Resampling::kBicubic);
  EXPECT_EQ(sum_of(small), 2214);
  EXPECT_EQ(channel(small, 0, 0), (V{98, 155, 146}));
  EXPECT_EQ(channel(small, 1, 2), (V{110, 125, 125}));
  const Image large = resized(image, {8, 10}, Resampling::kBicubic);
  EXPECT_EQ(sum_of(large), 29131);
  EXPECT_EQ(channel(large, 0, 0), (V{0, 50, 143, 220, 120, 110, 189, 74, 94, 169}));
}

TEST(Resample, PartsOfDrawnImagesArePillows) {
  for (const GoldenImage& golden : golden_images()) {
    const auto box = golden.facts["box"].get<std::vector<int64_t>>();
    const Image image = decode_image(golden.source(), {.transparency = Transparency::kDrop});
    const Image part = resized(image, {box[1], box[2]}, static_cast<Resampling>(box[0]),
                               ImageBox{box[3], box[4], {box[5], box[6]}});
    EXPECT_EQ(crc_of(part.bytes()), golden.facts["resized"].get<uint32_t>()) << golden.name;
  }
}

TEST(Resample, ThePartIsThatOfTheWhole) {
  std::mt19937 generator(1);
  const auto draw = [&](int64_t most) { return 1 + static_cast<int64_t>(generator() % most); };
  for (int i = 0; i < 300; ++i) {
    const Image image = random_image(generator, {draw(i % 7 ? 60 : 400), draw(i % 7 ? 60 : 3)});
    const ImageSize size = {draw(80), draw(80)};
    const auto filter = static_cast<Resampling>(1 + generator() % 5);
    ImageBox box{.size = {draw(size.height), draw(size.width)}};
    box.top = static_cast<int64_t>(generator() % (size.height - box.size.height + 1));
    box.left = static_cast<int64_t>(generator() % (size.width - box.size.width + 1));
    const Image whole = resized(image, size, filter);
    ASSERT_TRUE(same(resized(image, size, filter, box), crop(whole, box)));
  }
}

TEST(Resample, VectorsGiveTheBytesOfPlainLoops) {
  std::mt19937 generator(2);
  for (int i = 0; i < 300; ++i) {
    const int64_t from = 1 + generator() % 200, to = 1 + generator() % 200;
    const auto filter = static_cast<Resampling>(1 + generator() % 5);
    const auto weights = media::axis_weights(from, to, filter, 0, to);
    const Image row = random_image(generator, {1, from});
    const media::RowPass pass(weights);
    Image vectors({1, to}), plain({1, to});
    pass.run(row.row(0), vectors.row(0));
    pass.run_plain(row.row(0), plain.row(0));
    ASSERT_TRUE(same(vectors, plain)) << from << " to " << to;

    const Image columns =
        random_image(generator, {from, 1 + static_cast<int64_t>(generator() % 40)});
    Image a({1, columns.width()}), b({1, columns.width()});
    for (int64_t y = 0; y < to; ++y) {
      const uint8_t* rows = columns.row(weights.first[y]);
      media::column_sums(rows, columns.row_bytes(), weights.of(y), weights.taps[y],
                         columns.row_bytes(), a.row(0));
      media::column_sums_plain(rows, columns.row_bytes(), weights.of(y), weights.taps[y], 0,
                               columns.row_bytes(), b.row(0));
      ASSERT_TRUE(same(a, b)) << from << " to " << to;
    }
  }
}

// Weights of rows of very many pixels are made in parts.
TEST(Resample, LongRowsAreFilteredInParts) {
  std::mt19937 generator(3);
  const Image image = random_image(generator, {1, 300'000});
  const Image whole = resized(image, {1, 5}, Resampling::kLanczos);
  const auto weights = media::axis_weights(300'000, 5, Resampling::kLanczos, 0, 5);
  EXPECT_GT(weights.most_taps * 5, 1 << 18);
  Image expected({1, 5});
  media::RowPass(weights).run_plain(image.row(0), expected.row(0));
  EXPECT_TRUE(same(whole, expected));
}

}  // namespace
}  // namespace megatron
