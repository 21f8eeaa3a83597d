// Exact neighbours on a GPU equal those on the CPU, at a rate near that of the products.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "megatron/inference/retrieval/device_flat_index.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor near_centres(int64_t rows, int64_t width) {
  const at::Tensor centres = at::randn({40, width}, at::kFloat);
  return centres.index_select(0, at::randint(40, {rows}, at::kLong)) +
         0.05 * at::randn({rows, width}, at::kFloat) + 3;
}

TEST(FlatIndexGpu, EqualsTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(1);
  for (const auto& [rows, width, k] :
       std::vector<std::array<int64_t, 3>>{{20011, 64, 50}, {5000, 40, 7}, {3000, 37, 3000}}) {
    at::Tensor all = near_centres(rows, width);
    all.narrow(0, rows - 500, 500).copy_(all.narrow(0, 0, 500));  // equal distances
    const at::Tensor queries = near_centres(100, width);
    const auto found = [&](at::Device device, int64_t capacity) {
      DeviceVectors part(rows, width, device);
      part.set(0, all.narrow(0, 0, rows / 2));
      part.set(rows / 2, all.narrow(0, rows / 2, rows - rows / 2));
      NearestVectors nearest(100, k, device);
      search_device_vectors(part, queries.to(device), 7, nearest, capacity);
      return nearest;
    };
    const NearestVectors expected = found(at::kCPU, 2048);
    for (const int64_t capacity : {2048, 100}) {
      const NearestVectors got = found(kGpu, capacity);
      EXPECT_TRUE(at::equal(got.ids.cpu(), expected.ids)) << width << " " << capacity;
      EXPECT_TRUE(at::allclose(got.distances.cpu(), expected.distances, 1e-12, 0.0));
    }
  }
}

double seconds_of(const std::function<void()>& work) {
  at::zeros({1}, kGpu).item();
  const auto begin = std::chrono::steady_clock::now();
  work();
  at::zeros({1}, kGpu).item();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// 4 M vectors of 1024 elements, the 200 nearest of 8192 queries. Prints the rate of products beside
// that of a product alone, and how many of the ids are those of an order by fp64.
TEST(FlatIndexGpu, SearchesAtTheRateOfProducts) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 4'000'000, kWidth = 1024, kQueries = 8192, kNearest = 200;
  constexpr int64_t kBlock = 100'000, kChecked = 64;
  at::manual_seed(2);
  const auto options = at::dtype(at::kFloat).device(kGpu);
  DeviceVectors part(kRows, kWidth, kGpu);
  for (int64_t at = 0; at < kRows; at += kBlock) part.set(at, at::randn({kBlock, kWidth}, options));
  const at::Tensor queries = at::randn({kQueries, kWidth}, options);
  const auto search = [&] {
    NearestVectors nearest(kQueries, kNearest, kGpu);
    search_device_vectors(part, queries, 0, nearest);
    return nearest;
  };
  const NearestVectors found = search();
  const double seconds = seconds_of([&] { search(); });
  const at::Tensor a = queries.to(at::kBFloat16), b = part.rounded.narrow(0, 0, 65536);
  at::Tensor c = at::empty({kQueries, 65536}, a.options());
  constexpr int kTimes = 50;
  linear_forward_into(a, b, {}, c);
  const double product = seconds_of([&] {
                           for (int i = 0; i < kTimes; ++i) linear_forward_into(a, b, {}, c);
                         }) /
                         kTimes;
  const double of_search = 2.0 * kRows * kWidth * kQueries / seconds,
               of_product = 2.0 * 65536 * kWidth * kQueries / product;
  // The order by fp64.
  const at::Tensor asked = queries.narrow(0, 0, kChecked).to(at::kDouble);
  at::Tensor best = at::empty({kChecked, 0}, asked.options()),
             ids = at::empty({kChecked, 0}, asked.options().dtype(at::kLong));
  for (int64_t at = 0; at < kRows; at += kBlock) {
    const at::Tensor rows = part.vectors.narrow(0, at, kBlock).to(at::kDouble);
    const at::Tensor distances = rows.square().sum(1) - 2 * asked.mm(rows.t());
    const auto [values, places] = distances.topk(kNearest, 1, /*largest=*/false);
    const auto [all, order] =
        at::cat({best, values}, 1).topk(std::min(kNearest, best.size(1) + kNearest), 1, false);
    ids = at::cat({ids, places + at}, 1).gather(1, order);
    best = all;
  }
  const at::Tensor got = std::get<0>(found.ids.narrow(0, 0, kChecked).sort(1));
  const double same = got.eq(std::get<0>(ids.sort(1))).to(at::kDouble).mean().item<double>();
  std::printf(
      "flat search of %lld in %lld x %lld: %.1f ms, %.0f TFLOP/s, a product %.0f: %.1f%%; %.4f%% "
      "of the ids\n",
      static_cast<long long>(kQueries), static_cast<long long>(kRows),
      static_cast<long long>(kWidth), seconds * 1e3, of_search / 1e12, of_product / 1e12,
      100 * of_search / of_product, 100 * same);
  EXPECT_EQ(same, 1.0);
  EXPECT_GT(of_search / of_product, 0.5);
}

}  // namespace
}  // namespace megatron
