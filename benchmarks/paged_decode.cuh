// What benchmarks of attention of decoding steps over a paged cache share: the shape of Llama 3 8B
// (32 heads in 8 groups of 128 features, bf16), blocks of 64 positions in random order, all
// sequences equally long; our kernels on it, and what takes how long.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "megatron/kernels/attention/ordered_attention.h"
#include "megatron/kernels/attention/paged_attention.h"

namespace paged_decode {

constexpr int kHeads = 32, kGroups = 8, kSize = 128, kBlock = 64;
constexpr double kScale = 0.088388;
using Half = __nv_bfloat16;

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

static __global__ void fill(Half* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint64_t x = i * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    to[i] = __float2bfloat16(static_cast<float>(x >> 40) * 0x1p-23f - 1.0f);
  }
}

// Of one run: the median of seven means of ten.
template <class F>
double seconds(F&& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) run();
  std::vector<float> times;
  for (int i = 0; i < 7; ++i) {
    check(cudaEventRecord(begin));
    for (int j = 0; j < 10; ++j) run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + 3, times.end());
  return times[3] * 1e-4;
}

// Memory of the device until the object ends.
class Memory {
 public:
  Memory() = default;
  ~Memory() {
    for (void* p : all_) check(cudaFree(p));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  T* make(size_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, count * sizeof(T)));
    all_.push_back(p);
    return static_cast<T*>(p);
  }
  template <class T>
  T* copy(const std::vector<T>& values) {
    T* p = make<T>(values.size());
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }

 private:
  std::vector<void*> all_;
};

// `rows` sequences of `length` positions each, one query row of each.
struct Case {
  Case(int rows_, int length_) : rows(rows_), length(length_) {
    fill<<<1024, 256>>>(keys, elements());
    fill<<<1024, 256>>>(values, elements());
    fill<<<64, 256>>>(query, out_elements());
    std::vector<int32_t> order(size_t(rows) * blocks_of_row()), lengths(rows, length),
        sequences(rows);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    std::iota(sequences.begin(), sequences.end(), 0);
    table = memory.copy(order);
    lengths_d = memory.copy(lengths);
    sequences_d = memory.copy(sequences);
  }
  int blocks_of_row() const { return length / kBlock; }
  size_t elements() const { return size_t(rows) * length * kGroups * kSize; }  // of a pool
  size_t out_elements() const { return size_t(rows) * kHeads * kSize; }
  double gigabytes() const { return 4e-9 * static_cast<double>(elements()); }

  megatron::PagedPool pool(Half* data) const {
    return {data, int64_t{kBlock} * kGroups * kSize, kGroups * kSize, kSize, nullptr};
  }
  megatron::PagedAttention ours(Half* out) const {
    auto a = with_common(megatron::PagedAttention(), out);
    a.rows = rows;
    a.key_size = a.value_size = kSize;
    a.sequences = sequences_d;
    return a;
  }
  // That of batch-invariant mode.
  megatron::OrderedAttention ordered(Half* out) const {
    auto a = with_common(megatron::OrderedAttention(), out);
    a.size = kSize;
    a.query_part = a.query_row = a.out_part = a.out_row = kHeads * kSize;
    a.query_head = a.out_head = kSize;
    a.sequences = rows;
    return a;
  }
  template <class A>
  A with_common(A a, Half* out) const {
    a.dtype = megatron::DType::kBFloat16;
    a.heads = kHeads;
    a.groups = kGroups;
    a.scale = kScale;
    a.query = query;
    a.keys = pool(keys);
    a.values = pool(values);
    a.block_size = kBlock;
    a.lengths = lengths_d;
    a.block_table = table;
    a.table_stride = blocks_of_row();
    a.out = out;
    return a;
  }
  // The largest difference of two results.
  float apart(const Half* a, const Half* b) const {
    std::vector<Half> numbers[2];
    for (int i = 0; i < 2; ++i) {
      numbers[i].resize(out_elements());
      check(cudaMemcpy(numbers[i].data(), i == 0 ? a : b, out_elements() * sizeof(Half),
                       cudaMemcpyDeviceToHost));
    }
    float most = 0;
    for (size_t i = 0; i < out_elements(); ++i)
      most = std::max(most,
                      std::abs(__bfloat162float(numbers[0][i]) - __bfloat162float(numbers[1][i])));
    return most;
  }

  const int rows, length;
  Memory memory;
  Half *keys = memory.make<Half>(elements()), *values = memory.make<Half>(elements()),
       *query = memory.make<Half>(out_elements());
  int32_t *table = nullptr, *lengths_d = nullptr, *sequences_d = nullptr;
};

// Measures `run(case, out)`, a function of what takes so many seconds, after ours; prints GB/s of
// keys and values and the largest difference.
template <class F>
void next_to_ours(const char* name, F&& run) {
  for (const int length : {1024, 8192, 32768})
    for (const int rows : {1, 8, 64, 256}) {
      Case c(rows, length);
      Half* out[3];
      for (Half*& o : out) o = c.memory.make<Half>(c.out_elements());
      const megatron::PagedAttention ours = c.ours(out[0]);
      const megatron::OrderedAttention ordered = c.ordered(out[1]);
      const double time[3] = {seconds([&] { megatron::paged_tiles_cuda(ours, nullptr); }),
                              seconds([&] { megatron::ordered_attention_cuda(ordered, nullptr); }),
                              run(c, out[2])};
      const auto rate = [&](int i) { return c.gigabytes() / time[i]; };
      std::printf(
          "%3d x %5d: ours %6.0f GB/s (%.1f us), batch-invariant %6.0f (%.1f), %s %6.0f (%.1f), "
          "apart %.4f\n",
          rows, length, rate(0), time[0] * 1e6, rate(1), time[1] * 1e6, name, rate(2),
          time[2] * 1e6, std::max(c.apart(out[0], out[1]), c.apart(out[0], out[2])));
      std::fflush(stdout);
    }
}

}  // namespace paged_decode
