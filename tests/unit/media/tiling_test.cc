#include "megatron/media/tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

const std::vector<ImageSize> kPinpoints = {
    {336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}};

TEST(Tiling, ClosestGrid) {
  const auto grid = [](int64_t height, int64_t width, int64_t most = 12) {
    const TileGrid g = closest_grid({height, width}, {448, 448}, 1, most);
    return std::pair(g.columns, g.rows);
  };
  using P = std::pair<int64_t, int64_t>;
  EXPECT_EQ(grid(480, 640), P(4, 3));
  EXPECT_EQ(grid(448, 448), P(1, 1));
  EXPECT_EQ(grid(896, 896), P(2, 2));
  EXPECT_EQ(grid(600, 600), P(1, 1));
  EXPECT_EQ(grid(1000, 100), P(1, 10));
  EXPECT_EQ(grid(1080, 1920), P(4, 2));
  EXPECT_EQ(grid(2000, 3000), P(3, 2));
  EXPECT_EQ(grid(700, 500), P(3, 4));
  EXPECT_EQ(grid(480, 640, 6), P(3, 2));
}

TEST(Tiling, AreaWeightedGrid) {
  EXPECT_EQ(area_weighted_grid({600, 600}, 448, 12), (TileGrid{2, 2}));
  EXPECT_EQ(area_weighted_grid({2000, 3000}, 448, 12), (TileGrid{3, 4}));
}

TEST(Tiling, LlavaNext) {
  struct Case {
    ImageSize image, best, fitted, map;
    int64_t tokens;
  };
  // The map of features is that of the best resolution, without the rows or columns of the border.
  for (const Case& c : std::vector<Case>{{{480, 640}, {672, 672}, {504, 672}, {36, 48}, 2340},
                                         {{640, 480}, {672, 672}, {672, 504}, {48, 36}, 2352},
                                         {{336, 336}, {336, 672}, {336, 336}, {24, 24}, 1176},
                                         {{100, 1000}, {336, 1008}, {101, 1008}, {8, 72}, 1160},
                                         {{1000, 100}, {1008, 336}, {1008, 101}, {72, 8}, 1224},
                                         {{2000, 3000}, {672, 672}, {448, 672}, {32, 48}, 2144},
                                         {{500, 500}, {672, 672}, {672, 672}, {48, 48}, 2928},
                                         {{2911, 37}, {1008, 336}, {1008, 13}, {72, 0}, 648},
                                         {{37, 2911}, {336, 1008}, {13, 1008}, {0, 72}, 576}}) {
    SCOPED_TRACE(cat(c.image.height, "x", c.image.width));
    EXPECT_EQ(best_resolution(c.image, kPinpoints), c.best);
    EXPECT_EQ(fitted_size(c.image, c.best), c.fitted);
    const ImageSize map = {c.best.height / 14, c.best.width / 14};
    EXPECT_EQ(unpadded_map(c.image, map).size, c.map);
    EXPECT_EQ(llava_next_tokens(c.image, kPinpoints, 336, 24), c.tokens);
  }
  EXPECT_EQ(llava_next_tokens({1, 1}, kPinpoints, 336, 24), 1176);
  EXPECT_EQ(llava_next_tokens({333, 1001}, kPinpoints, 336, 24), 2328);
  EXPECT_EQ(llava_next_tokens({1009, 337}, kPinpoints, 336, 24), 2376);
}

TEST(Tiling, SmartSize) {
  const auto size = [](int64_t height, int64_t width) {
    return smart_size({height, width}, 28, 3136, 1'003'520);
  };
  EXPECT_EQ(size(480, 640), (ImageSize{476, 644}));
  EXPECT_EQ(size(1, 1), (ImageSize{56, 56}));
  EXPECT_EQ(size(28, 28), (ImageSize{56, 56}));
  EXPECT_EQ(size(56, 56), (ImageSize{56, 56}));
  EXPECT_EQ(size(224, 224), (ImageSize{224, 224}));
  EXPECT_EQ(size(2000, 3000), (ImageSize{812, 1204}));
  EXPECT_EQ(size(4000, 20), (ImageSize{4004, 28}));
  EXPECT_EQ(size(70, 98), (ImageSize{56, 112}));  // 2.5 and 3.5 to even
  EXPECT_EQ(size(71, 97), (ImageSize{84, 84}));
  EXPECT_EQ(size(100, 35), (ImageSize{112, 28}));
  EXPECT_EQ(size(1080, 1920), (ImageSize{728, 1316}));
  EXPECT_EQ(size(333, 777), (ImageSize{336, 784}));
  EXPECT_EQ(error_of([&] { size(4001, 20); }),
            "the image is 4001x20; expected no side to be more than 200 times the other one");
}

TEST(Tiling, PanAndScan) {
  const auto sides = [](int64_t height, int64_t width) {
    std::vector<std::pair<int64_t, int64_t>> out;
    for (const ImageBox& box : pan_and_scan({height, width}, {}))
      out.emplace_back(box.size.height, box.size.width);
    return out;
  };
  using V = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(sides(480, 640), (V{{480, 320}, {480, 320}}));
  EXPECT_EQ(sides(400, 1200), (V{{400, 400}, {400, 400}, {400, 400}}));
  EXPECT_EQ(sides(256, 2000), (V{{256, 500}, {256, 500}, {256, 500}, {256, 500}}));
  EXPECT_EQ(sides(100, 1000), V{});
  EXPECT_EQ(sides(300, 1000), (V{{300, 334}, {300, 334}, {300, 332}}));
  EXPECT_EQ(sides(840, 700), (V{{420, 700}, {420, 700}}));
  EXPECT_EQ(sides(700, 840), (V{{700, 420}, {700, 420}}));
}

// The sizes of tests/golden/media/make_processors.py.
std::vector<ImageSize> drawn_sizes(int count) {
  uint64_t state = 1;
  const auto side = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto n = static_cast<int64_t>(state >> 33);
    return n / 3000 % 10 == 0 ? 1 + n % 40 : 1 + n % 3000;
  };
  std::vector<ImageSize> out;
  for (int i = 0; i < count; ++i) {
    const int64_t height = side();
    out.push_back({height, side()});
  }
  return out;
}

TEST(Tiling, TwentyThousandSizesAreAsInTransformers) {
  std::map<std::string, std::vector<int32_t>> numbers;
  const auto add = [&](const std::string& name, std::initializer_list<int64_t> values) {
    for (const int64_t value : values) numbers[name].push_back(static_cast<int32_t>(value));
  };
  for (const ImageSize& size : drawn_sizes(20'000)) {
    const ImageSize best = best_resolution(size, kPinpoints), fitted = fitted_size(size, best);
    add("best_resolution", {best.height, best.width});
    add("fitted_size", {fitted.height, fitted.width});
    add("llava_next_tokens", {llava_next_tokens(size, kPinpoints, 336, 24)});
    const TileGrid grid = closest_grid(size, {448, 448}, 1, 12);
    add("closest_grid", {grid.rows, grid.columns});
    ImageSize smart;
    if (std::max(size.height, size.width) <= 200 * std::min(size.height, size.width))
      smart = smart_size(size, 28, 3136, 1'003'520);
    add("smart_size", {smart.height, smart.width});
    const auto crops = pan_and_scan(size, {});
    add("pan_and_scan", {static_cast<int64_t>(crops.size())});
    for (const ImageBox& box : crops) add("pan_and_scan", {box.size.height, box.size.width});
  }
  const auto sums = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/tilings.json"));
  EXPECT_EQ(sums.size(), numbers.size());
  for (const auto& [name, values] : numbers)
    EXPECT_EQ(crc_of({reinterpret_cast<const uint8_t*>(values.data()), 4 * values.size()}),
              sums.at(name).get<uint32_t>())
        << name;
}

}  // namespace
}  // namespace megatron
