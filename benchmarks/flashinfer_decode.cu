// Attention of decoding steps over a paged cache, next to the kernel of FlashInfer's headers
// (paged_decode.cuh).
//
//   pip download --no-deps flashinfer-python==0.7.2.post1
//   unzip -q flashinfer_python-*.whl 'flashinfer/data/*'
//   cmake --preset gpu -DMEGATRON_FLASHINFER_DIR=$PWD/flashinfer/data
//   cmake --build build/gpu --target flashinfer_decode
//
// Prints, for each number of sequences and length, GB/s of keys and values: ours, that of
// batch-invariant mode, FlashInfer's; and the largest difference of the numbers.
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include "benchmarks/paged_decode.cuh"

namespace {

using namespace paged_decode;
using Params = flashinfer::BatchDecodeParams<Half, Half, Half, int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;
constexpr auto kNoPositions = flashinfer::PosEncodingMode::kNone;

double flashinfer_seconds(Case& c, Half* out) {
  std::vector<int32_t> ends(c.rows + 1), last(c.rows, kBlock);
  for (int i = 0; i <= c.rows; ++i) ends[i] = i * c.blocks_of_row();
  flashinfer::paged_kv_t<Half, int32_t> paged(kGroups, kBlock, kSize, c.rows,
                                              flashinfer::QKVLayout::kNHD, c.keys, c.values,
                                              c.table, c.memory.copy(ends), c.memory.copy(last));
  Params params(c.query, nullptr, paged, out, nullptr, nullptr, kHeads, kHeads * kSize, kSize, -1,
                0.0f, static_cast<float>(kScale), 1.0f, 1e4f);
  const size_t floats = size_t{512} << 20, ints = size_t{64} << 20;
  char *float_space = c.memory.make<char>(floats), *int_space = c.memory.make<char>(ints);
  void* host_space = nullptr;
  check(cudaMallocHost(&host_space, ints));
  flashinfer::DecodePlanInfo plan;
  const auto estimate = flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<
      kHeads / kGroups, kSize, kNoPositions, Variant, Params>;
  check(flashinfer::DecodePlan<kSize, kNoPositions, Variant, Params>(
      float_space, floats, int_space, host_space, ints, plan, ends.data(), c.rows, kHeads, kBlock,
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
  const double time = seconds([&] {
    check((flashinfer::BatchDecodeWithPagedKVCacheDispatched<kSize, kNoPositions, Variant, Params>(
        params, parts, sums, false, nullptr)));
  });
  check(cudaFreeHost(host_space));
  return time;
}

}  // namespace

int main() { paged_decode::next_to_ours("FlashInfer", flashinfer_seconds); }
