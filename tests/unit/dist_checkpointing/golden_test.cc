// The checkpoint of format version 1 in tests/golden/checkpoint/v1 is still read, and still written
// byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "megatron/base/check.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kGoldenRows = 4;

// Whole tensors, a box split by rows, and a flat split.
SaveRequest golden_request(TinyModel& model, const fs::path& root) {
  SaveRequest request = request_for(model, root, 100);
  std::vector<ShardedTensor> tensors = request.tensors;
  ShardedTensor upper = tensors[0], lower = tensors[0];
  upper.local_shape = lower.local_shape = {2, 64};
  upper.pieces = {{{{0, 0}, {2, 64}}, {0, 0}}};
  lower.pieces = {{{{2, 0}, {2, 64}}, {0, 0}}};
  lower.data = static_cast<float*>(lower.data) + 128;
  ShardedTensor first = tensors[3], second = tensors[3];
  first.flat_end = second.flat_begin = 50;
  second.data = static_cast<double*>(second.data) + 50;
  request.tensors = {upper, lower, tensors[1], tensors[2], first, second, tensors[4]};
  return request;
}

TEST(Golden, VersionOneIsReadAndWritten) {
  const fs::path golden = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/checkpoint/v1";
  TinyModel model(7, kGoldenRows);
  if (std::getenv("MEGATRON_WRITE_GOLDEN") != nullptr)
    save_checkpoint(golden_request(model, golden));
  const fs::path directory = golden / "iter_0000100";
  EXPECT_TRUE(verify_checkpoint(directory).empty());
  EXPECT_TRUE(holds_seed(directory, 7, kGoldenRows));
  ScratchFolder folder;
  const fs::path now = save_checkpoint(golden_request(model, folder.path())).directory;
  EXPECT_EQ(slurp(now / "rank_00000.safetensors"), slurp(directory / "rank_00000.safetensors"));
  EXPECT_EQ(slurp(now / "config.yaml"), slurp(directory / "config.yaml"));
}

}  // namespace
}  // namespace megatron
