// Attention of decoding steps over a paged cache, next to the kernel of FlashInfer's headers: the
// shape of Llama 3 8B (32 heads in 8 groups of 128 features, bf16), blocks of 64 positions in
// random order, all sequences equally long.
//
//   pip download --no-deps flashinfer-python==0.7.2.post1
//   unzip -q flashinfer_python-*.whl 'flashinfer/data/*'
//   cmake --preset gpu -DMEGATRON_FLASHINFER_DIR=$PWD/flashinfer/data
//   cmake --build build/gpu --target flashinfer_decode
//
// Prints, for each number of sequences and length, GB/s of keys and values: ours, that of
// batch-invariant mode, FlashInfer's; and the largest difference of the numbers.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>
#include <numeric>
#include <random>
#include <vector>

#include "megatron/kernels/attention/ordered_attention.h"
#include "megatron/kernels/attention/paged_attention.h"

namespace {

constexpr int kHeads = 32, kGroups = 8, kSize = 128, kBlock = 64;
using Half = __nv_bfloat16;
using Params = flashinfer::BatchDecodeParams<Half, Half, Half, int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;
constexpr auto kNoPositions = flashinfer::PosEncodingMode::kNone;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* device(size_t count) {
  T* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)));
  return p;
}

template <class T>
T* copied(const std::vector<T>& values) {
  T* p = device<T>(values.size());
  check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

__global__ void fill(Half* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint64_t x = i * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    to[i] = __float2bfloat16(static_cast<float>(x >> 40) * 0x1p-23f - 1.0f);
  }
}

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

}  // namespace

int main() {
  for (const int length : {1024, 8192, 32768})
    for (const int rows : {1, 8, 64, 256}) {
      const int blocks_of_row = length / kBlock, blocks = rows * blocks_of_row;
      const size_t elements = size_t(blocks) * kBlock * kGroups * kSize;
      Half *keys = device<Half>(elements), *values = device<Half>(elements),
           *query = device<Half>(rows * kHeads * kSize);
      fill<<<1024, 256>>>(keys, elements);
      fill<<<1024, 256>>>(values, elements);
      fill<<<64, 256>>>(query, rows * kHeads * kSize);
      std::vector<int32_t> table(blocks), lengths(rows, length), sequences(rows), ends(rows + 1),
          last(rows, kBlock);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), std::mt19937(1));
      std::iota(sequences.begin(), sequences.end(), 0);
      for (int i = 0; i <= rows; ++i) ends[i] = i * blocks_of_row;
      int32_t *table_d = copied(table), *lengths_d = copied(lengths),
              *sequences_d = copied(sequences), *ends_d = copied(ends), *last_d = copied(last);
      Half* out[3];
      for (Half*& o : out) o = device<Half>(rows * kHeads * kSize);

      const double scale = 0.088388;
      const auto pool = [&](Half* data) {
        return megatron::PagedPool{data, int64_t{kBlock} * kGroups * kSize, kGroups * kSize, kSize,
                                   nullptr};
      };
      megatron::PagedAttention ours;
      ours.dtype = megatron::DType::kBFloat16;
      ours.rows = rows;
      ours.heads = kHeads;
      ours.groups = kGroups;
      ours.key_size = ours.value_size = kSize;
      ours.scale = scale;
      ours.query = query;
      ours.keys = pool(keys);
      ours.values = pool(values);
      ours.block_size = kBlock;
      ours.sequences = sequences_d;
      ours.lengths = lengths_d;
      ours.block_table = table_d;
      ours.table_stride = blocks_of_row;
      ours.out = out[0];
      megatron::OrderedAttention ordered;
      ordered.dtype = megatron::DType::kBFloat16;
      ordered.heads = kHeads;
      ordered.groups = kGroups;
      ordered.size = kSize;
      ordered.scale = scale;
      ordered.query = query;
      ordered.query_part = ordered.query_row = ordered.out_part = ordered.out_row = kHeads * kSize;
      ordered.query_head = ordered.out_head = kSize;
      ordered.out = out[1];
      ordered.keys = ours.keys;
      ordered.values = ours.values;
      ordered.block_size = kBlock;
      ordered.block_table = table_d;
      ordered.table_stride = blocks_of_row;
      ordered.sequences = rows;
      ordered.lengths = lengths_d;

      flashinfer::paged_kv_t<Half, int32_t> paged(kGroups, kBlock, kSize, rows,
                                                  flashinfer::QKVLayout::kNHD, keys, values,
                                                  table_d, ends_d, last_d);
      Params params(query, nullptr, paged, out[2], nullptr, nullptr, kHeads, kHeads * kSize, kSize,
                    -1, 0.0f, static_cast<float>(scale), 1.0f, 1e4f);
      const size_t floats = size_t{512} << 20, ints = size_t{64} << 20;
      char *float_space = device<char>(floats), *int_space = device<char>(ints);
      void* host_space = nullptr;
      check(cudaMallocHost(&host_space, ints));
      flashinfer::DecodePlanInfo plan;
      const auto estimate = flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<
          kHeads / kGroups, kSize, kNoPositions, Variant, Params>;
      check(flashinfer::DecodePlan<kSize, kNoPositions, Variant, Params>(
          float_space, floats, int_space, host_space, ints, plan, ends.data(), rows, kHeads, kBlock,
          false, nullptr, estimate));
      const auto at = [&](char* space, int64_t offset) {
        return reinterpret_cast<int32_t*>(space + offset);
      };
      params.request_indices = at(int_space, plan.request_indices_offset);
      params.kv_tile_indices = at(int_space, plan.kv_tile_indices_offset);
      params.o_indptr = at(int_space, plan.o_indptr_offset);
      params.kv_chunk_size_ptr = at(int_space, plan.kv_chunk_size_ptr_offset);
      params.padded_batch_size = plan.padded_batch_size;
      Half* parts = plan.split_kv ? reinterpret_cast<Half*>(float_space + plan.v_offset) : nullptr;
      float* sums = plan.split_kv ? reinterpret_cast<float*>(float_space + plan.s_offset) : nullptr;

      const double time[3] = {
          seconds([&] { megatron::paged_tiles_cuda(ours, nullptr); }),
          seconds([&] { megatron::ordered_attention_cuda(ordered, nullptr); }), seconds([&] {
            check((flashinfer::BatchDecodeWithPagedKVCacheDispatched<kSize, kNoPositions, Variant,
                                                                     Params>(params, parts, sums,
                                                                             false, nullptr)));
          })};
      std::vector<Half> numbers[3];
      for (int i = 0; i < 3; ++i) {
        numbers[i].resize(rows * kHeads * kSize);
        check(cudaMemcpy(numbers[i].data(), out[i], numbers[i].size() * 2, cudaMemcpyDeviceToHost));
      }
      float apart = 0;
      for (size_t i = 0; i < numbers[0].size(); ++i)
        for (int j = 1; j < 3; ++j)
          apart = std::max(
              apart, std::abs(__bfloat162float(numbers[0][i]) - __bfloat162float(numbers[j][i])));
      const double bytes = 4.0 * static_cast<double>(elements);
      std::printf(
          "%3d x %5d: ours %6.0f GB/s (%.1f us), batch-invariant %6.0f (%.1f), FlashInfer %6.0f "
          "(%.1f), apart %.4f\n",
          rows, length, bytes / time[0] * 1e-9, time[0] * 1e6, bytes / time[1] * 1e-9,
          time[1] * 1e6, bytes / time[2] * 1e-9, time[2] * 1e6, apart);
      std::fflush(stdout);
      for (void* p : {(void*)keys, (void*)values, (void*)query, (void*)table_d, (void*)lengths_d,
                      (void*)sequences_d, (void*)ends_d, (void*)last_d, (void*)out[0],
                      (void*)out[1], (void*)out[2], (void*)float_space, (void*)int_space})
        check(cudaFree(p));
      check(cudaFreeHost(host_space));
    }
}
