// Indices of Faiss next to the exact one; files. Skipped where the library was not built.
// tests/golden/retro/check_faiss_files.py compares files and ids with faiss-cpu.
#include "megatron/inference/retrieval/faiss_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "megatron/base/check.h"
#include "megatron/inference/retrieval/flat_index.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

constexpr int64_t kWidth = 16, kRows = 8000, kQueries = 100, kNearest = 10, kLists = 32;

class FaissIndexTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string error = error_of([] { FaissIndex::make(kWidth, "Flat"); });
    if (error.find("was not built or cannot be loaded") != std::string::npos)
      GTEST_SKIP() << "Faiss is not there";
    ASSERT_EQ(error, "");
    folder_ = std::filesystem::path(testing::TempDir()) / "faiss_index_test";
    std::filesystem::remove_all(folder_);
    std::mt19937 random(7);
    std::normal_distribution<float> draw;
    std::vector<float> centres(200 * kWidth);
    for (float& x : centres) x = 8 * draw(random);
    const auto around = [&](int64_t rows) {
      std::vector<float> out;
      for (int64_t i = 0; i < rows; ++i) {
        const size_t centre = random() % 200 * kWidth;
        for (size_t j = 0; j < kWidth; ++j) out.push_back(centres[centre + j] + draw(random));
      }
      return out;
    };
    vectors_ = around(kRows);
    queries_ = around(kQueries);
    const BlockFiles files(folder_ / "vectors", {kRows, kRows, kWidth, "<f4"});
    files.write(files.block(0), std::as_bytes(std::span(vectors_)));
    exact_ = FlatIndex(files).search(queries_, kNearest);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  FaissIndex filled(const std::string& kind) const {
    FaissIndex index = FaissIndex::make(kWidth, kind);
    index.train(vectors_);
    index.add(vectors_);
    return index;
  }
  double recall(const std::vector<int64_t>& found) const {
    int64_t hits = 0;
    for (int64_t i = 0; i < kQueries; ++i)
      for (int64_t j = 0; j < kNearest; ++j)
        hits += std::count(exact_.begin() + i * kNearest, exact_.begin() + (i + 1) * kNearest,
                           found[static_cast<size_t>(i * kNearest + j)]);
    return static_cast<double>(hits) / (kQueries * kNearest);
  }

  std::filesystem::path folder_;
  std::vector<float> vectors_, queries_;
  std::vector<int64_t> exact_;
};

TEST_F(FaissIndexTest, FlatFindsWhatTheExactIndexFinds) {
  EXPECT_EQ(filled("Flat").search(queries_, kNearest), exact_);
}

TEST_F(FaissIndexTest, ListsAndGraphsFindMost) {
  FaissIndex index = filled("IVF32_HNSW32,Flat");
  index.set_search(kLists / 16, 256);
  EXPECT_GE(recall(index.search(queries_, kNearest)), 0.95);
  index.set_search(kLists, 256);
  EXPECT_EQ(recall(index.search(queries_, kNearest)), 1.0);
}

TEST_F(FaissIndexTest, FilesHoldTheIndex) {
  FaissIndex index = filled("IVF32,SQ8");
  EXPECT_EQ(index.size(), kRows);
  const std::filesystem::path file = folder_ / "index" / "added";
  index.write(file);
  FaissIndex again = FaissIndex::read(file);
  EXPECT_EQ(again.size(), kRows);
  EXPECT_EQ(again.width(), kWidth);
  index.set_search(8, 64);
  again.set_search(8, 64);
  EXPECT_EQ(again.search(queries_, kNearest), index.search(queries_, kNearest));
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  EXPECT_THAT(error_of([&] { FaissIndex::read(file); }),
              testing::StartsWith(cat(file.string(), ": Faiss says: ")));
}

TEST_F(FaissIndexTest, SaysWhatIsWrong) {
  EXPECT_EQ(error_of([] { FaissIndex::make(kWidth, "nonsense"); }),
            "--retro-index-str nonsense of vectors of 16: Faiss says: could not parse index string "
            "nonsense");
  FaissIndex index = FaissIndex::make(kWidth, "IVF32,Flat");
  EXPECT_EQ(error_of([&] { index.train(std::span(vectors_).first(10 * kWidth)); }),
            "training the index: Faiss says: Number of training points (10) should be at least as "
            "large as number of clusters (32)");
}

}  // namespace
}  // namespace megatron
