#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/ssm/ssd_step.h"

namespace megatron {
namespace {

using bf16 = __nv_bfloat16;

// A warp updates kRows rows of the state of a head; a lane has kN / 32 columns, in fours (twos
// where the state has 64).
template <class State, int kN, int kRows>
__global__ void __launch_bounds__(128) step_kernel(const __grid_constant__ SsdStepArgs args) {
  constexpr int kWide = kN / 32 < 4 ? kN / 32 : 4, kParts = kN / 32 / kWide;
  const int lane = threadIdx.x % 32;
  const int64_t warps_per_head = args.head_size / kRows;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int64_t head = warp / warps_per_head, first = warp % warps_per_head * kRows;
  const int64_t row = blockIdx.y;
  if (head >= args.heads) return;
  const int64_t slot = args.slots ? args.slots[row] : row;
  bf16* const y = static_cast<bf16*>(args.y) + row * args.y_row + head * args.head_size + first;
  if (slot < 0) {
    if (lane < kRows) y[lane] = __float2bfloat16_rn(0.0f);
    return;
  }
  const int64_t at = ((slot * args.heads + head) * args.head_size + first) * kN + lane * kWide;
  const State* const state = static_cast<const State*>(args.states) + at;
  State* const next = static_cast<State*>(args.next_states) + at;
  struct alignas(sizeof(State) * kWide) Piece {
    State at[kWide];
  };
  Piece pieces[kRows][kParts];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      pieces[r][i] = *reinterpret_cast<const Piece*>(state + r * kN + i * 32 * kWide);
  }
  const int64_t group = head / (args.heads / args.groups);
  const bf16* const b =
      static_cast<const bf16*>(args.b) + row * args.b_row + group * kN + lane * kWide;
  const bf16* const c =
      static_cast<const bf16*>(args.c) + row * args.c_row + group * kN + lane * kWide;
  float bs[kParts][kWide], cs[kParts][kWide];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      bs[i][j] = __bfloat162float(b[i * 32 * kWide + j]);
      cs[i][j] = __bfloat162float(c[i * 32 * kWide + j]);
    }
  }
  const float step = args.dt[row * args.dt_row + head];
  const float decay = expf(step * args.a[head]);
  const float mine = lane < kRows
                         ? __bfloat162float(static_cast<const bf16*>(
                               args.x)[row * args.x_row + head * args.head_size + first + lane])
                         : 0.0f;
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float input = __shfl_sync(0xffffffffu, mine, r) * step;
    sums[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const float s = decay * load_as<float>(pieces[r][i].at[j]) + input * bs[i][j];
        sums[r] += s * cs[i][j];
        store_as(pieces[r][i].at[j], s);
      }
      *reinterpret_cast<Piece*>(next + r * kN + i * 32 * kWide) = pieces[r][i];
    }
  }
  // Lane l gets the sum of row l / (32 / kRows).
#pragma unroll
  for (int held = kRows / 2, offset = 16; held > 0; held /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int r = 0; r < held; ++r) {
      const float send = upper ? sums[r] : sums[r + held];
      const float keep = upper ? sums[r + held] : sums[r];
      sums[r] = keep + __shfl_xor_sync(0xffffffffu, send, offset);
    }
  }
#pragma unroll
  for (int offset = 16 / kRows; offset > 0; offset /= 2)
    sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], offset);
  const int out = lane / (32 / kRows);
  const float x = __shfl_sync(0xffffffffu, mine, out);
  if (lane % (32 / kRows) == 0)
    y[out] = __float2bfloat16_rn(sums[0] + (args.d ? args.d[head] : 0.0f) * x);
}

template <class State, int kN>
void launch_step(const SsdStepArgs& args, void* stream) {
  constexpr int kRows = 8;
  const auto warps = args.heads * args.head_size / kRows;
  const dim3 grid(static_cast<unsigned>((warps + 3) / 4), static_cast<unsigned>(args.rows));
  step_kernel<State, kN, kRows><<<grid, 128, 0, as_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "a step of the scan of Mamba-2");
}

}  // namespace

void ssd_step_cuda(const SsdStepArgs& args, void* stream) {
  if (args.rows == 0) return;
  const auto with_state = [&](auto type) {
    using State = decltype(type);
    switch (args.state_size) {
      case 64:
        return launch_step<State, 64>(args, stream);
      case 128:
        return launch_step<State, 128>(args, stream);
      default:
        return launch_step<State, 256>(args, stream);
    }
  };
  if (args.state_dtype == DType::kBFloat16)
    with_state(bf16{});
  else
    with_state(float{});
}

}  // namespace megatron
