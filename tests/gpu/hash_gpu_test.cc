// Hashes on a GPU equal those on the CPU and are computed at memory bandwidth.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "megatron/tensor/hash.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

TEST(HashGpu, EqualsTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(1);
  std::vector<at::Tensor> cpu, gpu;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor whole = at::randn({3'000'000}, at::kDouble).to(type), there = whole.to(kGpu);
    for (const auto& [begin, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 3'000'000},
                                                                               {0, 0},
                                                                               {64, 1'000'000},
                                                                               {1, 999'999},
                                                                               {3, 1},
                                                                               {7, 65'536},
                                                                               {128, 65'537},
                                                                               {5, 131'071}}) {
      cpu.push_back(whole.narrow(0, begin, count));
      gpu.push_back(there.narrow(0, begin, count));
    }
  }
  at::Tensor expected = at::empty({static_cast<int64_t>(cpu.size())}, at::kLong),
             got = at::empty_like(expected, kGpu);
  TensorHashes(cpu).compute(expected);
  const TensorHashes on_gpu(gpu);
  for (int i = 0; i < 2; ++i) {
    on_gpu.compute(got);
    EXPECT_TRUE(at::equal(got.cpu(), expected));
  }
  gpu[0].view(at::kInt)[2'999'999].bitwise_xor_(1);
  on_gpu.compute(got);
  EXPECT_NE(got.cpu()[0].item<int64_t>(), expected[0].item<int64_t>());
}

// 2 GiB in 400 pieces; prints the rate, and fails far below what memory gives.
TEST(HashGpu, RunsAtTheSpeedOfMemory) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const int64_t count = int64_t{1} << 29;
  const at::Tensor all = at::ones({count}, at::TensorOptions().device(kGpu));
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < 400; ++i)
    pieces.push_back(all.narrow(0, i * (count / 400 / 64 * 64), count / 400));
  const TensorHashes hashes(pieces);
  at::Tensor out = at::empty({hashes.size()}, at::TensorOptions().dtype(at::kLong).device(kGpu));
  hashes.compute(out);
  out.cpu();
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kTimes = 20;
  for (int i = 0; i < kTimes; ++i) hashes.compute(out);
  out.cpu();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kTimes;
  const double rate = static_cast<double>(count) * 4 / seconds / 1e12;
  std::printf("hash of 2 GiB in 400 tensors: %.3f ms, %.2f TB/s\n", seconds * 1e3, rate);
  EXPECT_GT(rate, 1.0);
}

}  // namespace
}  // namespace megatron
