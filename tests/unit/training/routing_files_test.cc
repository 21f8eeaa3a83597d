// Choices of routers in files.
#include "megatron/training/experts/routing_files.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

class RoutingFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / "routing_files";
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

at::Tensor draw(int64_t rows, int64_t seed) {
  at::manual_seed(static_cast<uint64_t>(seed));
  return at::randint(0, 200, {rows, 3}, at::kInt);
}

TokenPositions rows_at(std::vector<int64_t> samples, std::vector<int64_t> positions) {
  return {at::tensor(samples, at::kLong), at::tensor(positions, at::kLong)};
}

// Two ranks have the even and the odd positions of a layer, and the second one a layer of its own.
TEST_F(RoutingFilesTest, GiveBackWhatRanksChose) {
  const TokenPositions even = rows_at({7, 5}, {0, 2}), odd = rows_at({7, 5}, {1, 3});
  RoutingFiles first(root_, {}, 0), second(root_, {}, 1);
  first.begin(12)->record->record(4, even, draw(4, 1));
  RoutingTable* table = second.begin(12)->record;
  table->record(4, odd, draw(4, 4));
  table->record(9, rows_at({6}, {0, 1}), draw(2, 5), /*use=*/1);
  first.end(12);
  second.end(12);
  RoutingFiles files({}, root_, 0);
  const RoutingReplay* replay = files.begin(12);
  EXPECT_EQ(replay->record, nullptr);
  EXPECT_TRUE(replay->only_experts);
  EXPECT_TRUE(at::equal(replay->imposed->find(4, even), draw(4, 1)));
  EXPECT_TRUE(at::equal(replay->imposed->find(4, odd), draw(4, 4)));
  EXPECT_TRUE(at::equal(replay->imposed->find(9, rows_at({6}, {1, 0}), 1), draw(2, 5).flip(0)));
  EXPECT_EQ(error_of([&] { replay->imposed->find(9, rows_at({6}, {0})); }),
            "no choices of layer 9 are recorded for sample 6");
}

TEST_F(RoutingFilesTest, DoNothingWithoutAFolder) {
  RoutingFiles files({}, {}, 0);
  EXPECT_EQ(files.begin(1), nullptr);
  files.end(1);
}

TEST_F(RoutingFilesTest, NameWhatIsMissingOrWrong) {
  RoutingFiles files({}, root_, 0);
  EXPECT_EQ(error_of([&] { files.begin(3); }),
            cat("--moe-routing-replay ", root_.string(),
                " has no choices of iteration 3: ", (root_ / "iter_0000003").string(),
                " is no folder\nhint: record them with --moe-routing-record"));
  fs::create_directories(root_);
  const fs::path file = root_ / "rank.safetensors";
  const int64_t sample = 1;
  const int32_t wide[2] = {0, 1};
  const int16_t narrow[2] = {0, 1};
  const auto error = [&](const SafetensorsTensor& tensor) {
    const SafetensorsTensor tensors[] = {{"samples", DType::kInt64, {1}, &sample}, tensor};
    write_safetensors(file, tensors);
    RoutingTable table;
    return error_of([&] { read_routing(file, table); });
  };
  EXPECT_EQ(error({"layer_1", DType::kInt32, {1, 1, 2}, wide}),
            file.string() + ": layer_1 is I32, expected I16");
  EXPECT_EQ(error({"layer_1", DType::kInt16, {2, 1, 1}, narrow}),
            file.string() + ": layer_1 is not [samples, positions, experts of a token]");
  EXPECT_EQ(error({"layer_x", DType::kInt16, {1, 1, 2}, narrow}),
            file.string() + ": layer_x is no tensor of choices of a router");
}

}  // namespace
}  // namespace megatron
