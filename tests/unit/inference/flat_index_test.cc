// Exact neighbours against NumPy's order in fp64 (tests/golden/retro/make_flat_goldens.py).
#include "megatron/inference/retrieval/flat_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "megatron/inference/retrieval/device_flat_index.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

// numpy.random.RandomState.randint(0, n): draws of as many bits as n - 1 has, until one is below n.
class Draws {
 public:
  explicit Draws(uint32_t seed) : engine_(seed) {}
  int64_t below(uint32_t n) {
    if (n == 1) return 0;
    const uint32_t mask = std::bit_ceil(n) - 1;
    uint32_t drawn = 0;
    do drawn = static_cast<uint32_t>(engine_()) & mask;
    while (drawn >= n);
    return drawn;
  }

 private:
  std::mt19937 engine_;
};

// Queries and vectors of a golden case.
class DrawnVectors {
 public:
  explicit DrawnVectors(const nlohmann::json& spec)
      : random_(spec["seed"].get<uint32_t>()),
        width_(spec["width"]),
        clusters_(spec["clusters"]),
        noise_(spec["noise"]) {
    for (int64_t i = 0; i < clusters_ * width_; ++i) centres_.push_back(draw(spec["spread"]));
    queries = rows(spec["queries"]);
    vectors = rows(spec["rows"]);
    for (size_t i = 49; i < vectors.size() / width(); i += 50)
      std::copy_n(vectors.begin() + (i - 7) * width(), width(), vectors.begin() + i * width());
  }
  std::vector<float> queries, vectors;

 private:
  size_t width() const { return static_cast<size_t>(width_); }
  int64_t draw(int64_t n) { return random_.below(static_cast<uint32_t>(n)); }
  std::vector<float> rows(int64_t count) {
    std::vector<float> out;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t centre = draw(clusters_);
      for (int64_t k = 0; k < width_; ++k)
        out.push_back(
            static_cast<float>(centres_[static_cast<size_t>(centre * width_ + k)] + draw(noise_)) /
            256);
    }
    return out;
  }

  Draws random_;
  int64_t width_, clusters_, noise_;
  std::vector<int64_t> centres_;
};

class FlatIndexTest : public ::testing::Test {
 protected:
  FlatIndexTest() : folder_(::testing::TempDir() + "/flat_index") {
    std::filesystem::remove_all(folder_);
  }
  ~FlatIndexTest() override { std::filesystem::remove_all(folder_); }
  BlockFiles store(const std::vector<float>& vectors, int64_t width, int64_t block_rows) const {
    const BlockFiles files(folder_ / std::to_string(block_rows),
                           {std::ssize(vectors) / width, block_rows, width, "<f4"});
    for (const RowBlock& block : files.missing())
      files.write(block, std::as_bytes(std::span(vectors).subspan(
                             static_cast<size_t>(block.begin * width), block.size() * width)));
    return files;
  }
  std::filesystem::path folder_;
};

TEST_F(FlatIndexTest, OrderIsNumpysInFp64) {
  const std::string golden = MEGATRON_SOURCE_DIR "/tests/golden/retro/flat_golden.json";
  for (const auto& spec : nlohmann::json::parse(std::ifstream(golden))) {
    SCOPED_TRACE(spec["name"].get<std::string>());
    const DrawnVectors drawn(spec);
    std::vector<int64_t> expected;
    for (const auto& row : spec["ids"])
      for (const auto& id : row) expected.push_back(id);
    for (const int64_t block : {7777, 1000000}) {
      const FlatIndex index(store(drawn.vectors, spec["width"], block));
      EXPECT_EQ(index.size(), spec["rows"].get<int64_t>());
      EXPECT_EQ(index.search(drawn.queries, spec["k"]), expected) << block;
    }
    // as on a GPU, with all blocks at once and some of them
    const BlockFiles files = store(drawn.vectors, spec["width"], 7777);
    for (const int64_t blocks : {100, 3}) {
      const int64_t bytes = blocks * 7777 * DeviceVectors::bytes_of_row(spec["width"]);
      const DeviceFlatIndex index(files, at::kCPU, bytes);
      for (int i = 0; i < 2; ++i)
        EXPECT_EQ(index.search(drawn.queries, spec["k"]), expected) << blocks;
    }
    std::filesystem::remove_all(folder_);
  }
}

// Far from the origin, fp32 products say nothing about which is nearer.
TEST_F(FlatIndexTest, OrderIsExactWhereProductsAreNot) {
  const int64_t width = 64, rows = 5000;
  std::vector<float> vectors, query(width, 4096);
  Draws random(5);
  for (int64_t i = 0; i < rows * width; ++i)
    vectors.push_back(4096 + static_cast<float>(random.below(64)) / 1024);
  std::vector<std::pair<double, int64_t>> all;
  int64_t misled = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t k = 0; k < width; ++k)
      sum += std::pow(static_cast<double>(vectors[static_cast<size_t>(r * width + k)]) - 4096, 2);
    all.emplace_back(sum, r);
  }
  std::sort(all.begin(), all.end());
  std::vector<int64_t> expected;
  for (int64_t i = 0; i < 30; ++i) expected.push_back(all[static_cast<size_t>(i)].second);
  EXPECT_EQ(FlatIndex(store(vectors, width, 999)).search(query, 30), expected);
  EXPECT_EQ(DeviceFlatIndex(store(vectors, width, 999), at::kCPU, 1 << 30).search(query, 30),
            expected);
  // what an order by fp32 alone would be
  const at::Tensor x = at::from_blob(vectors.data(), {rows, width}, at::kFloat);
  const at::Tensor fp32 = x.mul(x).sum(1) - 2 * x.mv(at::full({width}, 4096.0F));
  const at::Tensor order = std::get<1>(fp32.topk(30, 0, /*largest=*/false));
  for (int64_t i = 0; i < 30; ++i)
    misled += order[i].item<int64_t>() == expected[static_cast<size_t>(i)] ? 0 : 1;
  EXPECT_GT(misled, 20);
}

// Vectors of which most are equal leave no room for candidates; the lowest ids are the nearest.
TEST_F(FlatIndexTest, ManyEqualVectorsComeInTheOrderOfTheirIds) {
  const int64_t width = 8, rows = 3000, k = 40;
  std::vector<float> vectors(static_cast<size_t>(rows * width), 1.0F);
  Draws random(6);
  for (int64_t i = 0; i < rows * width; ++i)
    if (i / width % 3 == 2) vectors[static_cast<size_t>(i)] += random.below(1000) / 1e6F;
  std::vector<int64_t> expected;
  for (int64_t i = 0; i < k; ++i) expected.push_back(i / 2 * 3 + i % 2);
  const at::Tensor all = at::from_blob(vectors.data(), {rows, width}, at::kFloat);
  DeviceVectors part(rows, width, at::kCPU);
  part.set(0, all);
  for (const int64_t capacity : {1, 64, 4096}) {
    NearestVectors nearest(2, k, at::kCPU);
    search_device_vectors(part, at::ones({2, width}), 5, nearest, capacity);
    for (int64_t q = 0; q < 2; ++q)
      for (int64_t i = 0; i < k; ++i)
        EXPECT_EQ(nearest.ids[q][i].item<int64_t>(), expected[static_cast<size_t>(i)] + 5);
  }
  NearestVectors more(1, rows + 3, at::kCPU);
  search_device_vectors(part, at::ones({1, width}), 0, more);
  EXPECT_EQ(more.ids.ge(0).sum().item<int64_t>(), rows);
  EXPECT_EQ(std::get<0>(at::_unique(more.ids)).size(0), rows + 1);
}

TEST_F(FlatIndexTest, ADeviceHasRoomForABlock) {
  const BlockFiles files = store(std::vector<float>(400), 4, 10);
  EXPECT_THAT(error_of([&] { DeviceFlatIndex(files, at::kCPU, 100); }),
              ::testing::HasSubstr("a block of vectors needs 360 B on cpu, which has 100 B for "
                                   "vectors\nhint: a smaller --retro-block-size"));
}

TEST_F(FlatIndexTest, VectorsThatAreNotFiniteAreNamed) {
  std::vector<float> vectors(40, 1.0F);
  vectors[13] = INFINITY;
  const FlatIndex index(store(vectors, 4, 2));
  EXPECT_THAT(error_of([&] { index.search(std::vector<float>(4), 1); }),
              ::testing::HasSubstr("the vector of chunk 3 in"));
}

}  // namespace
}  // namespace megatron
