#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/ssm/unit_length.h"

namespace megatron {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kPack = 8;
constexpr unsigned kBlock = 256;

// A team of kSize / 8 threads has a head of a row, a thread 8 columns of it.
template <int kSize, bool kBackward>
__global__ void __launch_bounds__(kBlock) unit_rows(const __grid_constant__ UnitLengthArgs args) {
  constexpr unsigned kTeam = kSize / kPack;
  const unsigned team = (blockIdx.x * kBlock + threadIdx.x) / kTeam, lane = threadIdx.x % kTeam;
  const unsigned row = team / static_cast<unsigned>(args.heads),
                 head = team % static_cast<unsigned>(args.heads);
  const int64_t token = row / static_cast<unsigned>(args.samples),
                sample = row % static_cast<unsigned>(args.samples);
  const bool exists = token < args.tokens;
  const auto at = [&](const ScanRows& rows) {
    return static_cast<bf16*>(rows.data) + token * rows.token + sample * rows.sample +
           head * kSize + lane * kPack;
  };
  const auto load = [&](const ScanRows& rows, float (&to)[kPack]) {
    unpack<bf16>(exists ? load_once(at(rows)) : uint4{}, to);
  };
  float x[kPack], dy[kPack], squares = 0.0f, products = 0.0f;
  load(args.x, x);
  if constexpr (kBackward) load(args.dy, dy);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    squares += x[i] * x[i];
    if constexpr (kBackward) products += x[i] * dy[i];
  }
#pragma unroll
  for (int offset = kTeam / 2; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    products += __shfl_xor_sync(0xffffffffu, products, offset);
  }
  if (!exists) return;
  const float r = rsqrtf(squares + args.epsilon);
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    x[i] = kBackward ? r * (dy[i] - x[i] * products * r * r) : x[i] * r;
  *reinterpret_cast<uint4*>(at(kBackward ? args.dx : args.y)) = pack_words<bf16>(x);
}

template <bool kBackward>
void launch(const UnitLengthArgs& args, void* stream) {
  const int64_t threads = args.tokens * args.samples * args.heads * (args.size / kPack);
  if (threads == 0) return;
  auto* const kernel = args.size == 64 ? unit_rows<64, kBackward> : unit_rows<128, kBackward>;
  kernel<<<static_cast<unsigned>((threads + kBlock - 1) / kBlock), kBlock, 0, as_stream(stream)>>>(
      args);
  check_cuda(cudaGetLastError(), "heads scaled to length 1");
}

}  // namespace

void unit_length_forward_cuda(const UnitLengthArgs& args, void* stream) {
  launch<false>(args, stream);
}
void unit_length_backward_cuda(const UnitLengthArgs& args, void* stream) {
  launch<true>(args, stream);
}

}  // namespace megatron
