#include <algorithm>

#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/ssm/gated_norm.h"

namespace megatron {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kPack = 8;
constexpr int kSmallBlock = 128, kLargeBlock = 512;
// Threads of a multiprocessor that the registers of the backward suffice for: its teams all run at
// once.
constexpr int kSmallResident = 768, kLargeResident = 512;

// A team of kLanes threads works on the group of a row, a thread on kPacks packs of 8 columns;
// kLanes 0: a team is a block.
template <int kLanes>
__device__ __forceinline__ float2 team_sum(float2 value, float2* shared) {
#pragma unroll
  for (int offset = (kLanes ? kLanes : 32) / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
  if constexpr (kLanes == 0) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int w = 1; w < blockDim.x / 32; ++w) {
      value.x += shared[w].x;
      value.y += shared[w].y;
    }
  }
  return value;
}

__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }

__device__ __forceinline__ const bf16* at(const ScanRows& rows, int64_t token, int64_t sample,
                                          int64_t column) {
  return static_cast<const bf16*>(rows.data) + token * rows.token + sample * rows.sample + column;
}
__device__ __forceinline__ bf16* to(const ScanRows& rows, int64_t token, int64_t sample,
                                    int64_t column) {
  return const_cast<bf16*>(at(rows, token, sample, column));
}

template <int kLanes, int kPacks, bool kNormFirst>
__global__ void __launch_bounds__(kLanes ? kSmallBlock : kLargeBlock)
    norm_forward(const __grid_constant__ GatedNormArgs args) {
  __shared__ float2 shared[32];
  const unsigned lanes = kLanes ? kLanes : blockDim.x, lane = threadIdx.x % lanes;
  const unsigned team = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const unsigned row = team / static_cast<unsigned>(args.groups);
  const int64_t group = team % static_cast<unsigned>(args.groups);
  const bool exists = row < args.tokens * args.samples;
  const int64_t token = row / static_cast<unsigned>(args.samples),
                sample = row % static_cast<unsigned>(args.samples);
  const unsigned packs = static_cast<unsigned>(args.group_size) / kPack;
  uint4 ys[kPacks], zs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned pack = lane + i * lanes;
    ys[i] = zs[i] = uint4{};
    if (!exists || pack >= packs) continue;
    const int64_t column = group * args.group_size + pack * kPack;
    ys[i] = load_once(at(args.y, token, sample, column));
    zs[i] = load_once(at(args.z, token, sample, column));
  }
  float squares = 0.0f, v[kPacks][kPack];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float y[kPack];
    unpack<bf16>(ys[i], y);
    if constexpr (!kNormFirst) {
      float z[kPack];
      unpack<bf16>(zs[i], z);
#pragma unroll
      for (int j = 0; j < kPack; ++j) y[j] *= z[j] * sigmoid(z[j]);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      v[i][j] = y[j];
      squares += y[j] * y[j];
    }
  }
  squares = team_sum<kLanes>({squares, 0.0f}, shared).x;
  float rstd = rsqrtf(squares / static_cast<float>(args.group_size) + args.epsilon);
  if (!exists) return;
  if (args.given_rstd) rstd = args.given_rstd[row * args.groups + group];
  if (args.rstd && lane == 0) args.rstd[row * args.groups + group] = rstd;
  const bf16* const weight =
      static_cast<const bf16*>(args.weight) + (args.shared_weight ? 0 : group * args.group_size);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned pack = lane + i * lanes;
    if (pack >= packs) continue;
    float w[kPack];
    unpack<bf16>(*reinterpret_cast<const uint4*>(weight + pack * kPack), w);
    if constexpr (kNormFirst) {
      float z[kPack];
      unpack<bf16>(zs[i], z);
#pragma unroll
      for (int j = 0; j < kPack; ++j) w[j] *= z[j] * sigmoid(z[j]);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) w[j] *= v[i][j] * rstd;
    *reinterpret_cast<uint4*>(to(args.out, token, sample, group * args.group_size + pack * kPack)) =
        pack_words<bf16>(w);
  }
}

// The sum over the teams of a block of their kSize numbers, in the order of the teams; in the first
// team. All threads of the block call it.
template <int kLanes, int kSize>
__device__ __forceinline__ void sum_over_teams(float (&value)[kSize]) {
  __shared__ float shared[kSmallBlock][kSize + 1];
#pragma unroll
  for (int j = 0; j < kSize; ++j) shared[threadIdx.x][j] = value[j];
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  for (unsigned thread = threadIdx.x + kLanes; thread < blockDim.x; thread += kLanes) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) value[j] += shared[thread][j];
  }
}

// Team t works on group t % groups of every (teams / groups)-th row and sums its gradient of the
// weight over them; one that all groups share is summed over the teams of a block, too. It loads
// the next row while it computes one.
template <int kLanes, int kPacks, bool kNormFirst>
__global__ void __launch_bounds__(kLanes ? kSmallBlock : kLargeBlock,
                                  kLanes ? kSmallResident / kSmallBlock : 1)
    norm_backward(const __grid_constant__ GatedNormArgs args, unsigned runs) {
  __shared__ float2 shared[2][32];
  const unsigned lanes = kLanes ? kLanes : blockDim.x, lane = threadIdx.x % lanes;
  const unsigned team = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const unsigned run = team / static_cast<unsigned>(args.groups);
  const int64_t group = team % static_cast<unsigned>(args.groups);
  const unsigned packs = static_cast<unsigned>(args.group_size) / kPack;
  const float mean = 1.0f / static_cast<float>(args.group_size);
  const bf16* const weight =
      static_cast<const bf16*>(args.weight) + (args.shared_weight ? 0 : group * args.group_size);
  float dweight[kPacks][kPack] = {};
  // All teams of a warp take part in the sums of every step.
  const unsigned rows = static_cast<unsigned>(args.tokens * args.samples);
  const unsigned steps = (rows + runs - 1) / runs;
  uint4 next[3][kPacks];
  const auto fetch = [&](unsigned row) {
    const int64_t token = row / static_cast<unsigned>(args.samples),
                  sample = row % static_cast<unsigned>(args.samples);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned pack = lane + i * lanes;
      next[0][i] = next[1][i] = next[2][i] = uint4{};
      if (run >= runs || row >= rows || pack >= packs) continue;
      const int64_t column = group * args.group_size + pack * kPack;
      next[0][i] = load_once(at(args.y, token, sample, column));
      next[1][i] = load_once(at(args.z, token, sample, column));
      next[2][i] = load_once(at(args.dout, token, sample, column));
    }
  };
  fetch(run);
  for (unsigned step = 0; step < steps; ++step) {
    const unsigned row = step * runs + run;
    const bool exists = run < runs && row < rows;
    const int64_t token = row / static_cast<unsigned>(args.samples),
                  sample = row % static_cast<unsigned>(args.samples);
    uint4 ys[kPacks], zs[kPacks], gs[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) ys[i] = next[0][i], zs[i] = next[1][i], gs[i] = next[2][i];
    fetch(row + runs);
    // With the gate first v = y silu(z) and g = do w; else v = y and g = do w silu(z).
    float squares = 0.0f, products = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float y[kPack], z[kPack], g[kPack], w[kPack];
      unpack<bf16>(ys[i], y);
      unpack<bf16>(zs[i], z);
      unpack<bf16>(gs[i], g);
      const unsigned pack = lane + i * lanes;
      unpack<bf16>(pack < packs ? *reinterpret_cast<const uint4*>(weight + pack * kPack) : uint4{},
                   w);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float gate = z[j] * sigmoid(z[j]), v = kNormFirst ? y[j] : y[j] * gate;
        squares += v * v;
        products += v * g[j] * w[j] * (kNormFirst ? gate : 1.0f);
      }
    }
    const float2 sums = team_sum<kLanes>({squares, products}, shared[step % 2]);
    float rstd = rsqrtf(sums.x * mean + args.epsilon);
    if (!exists) continue;
    if (args.given_rstd) rstd = args.given_rstd[row * args.groups + group];
    const float along = sums.y * mean * rstd * rstd;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned pack = lane + i * lanes;
      if (pack >= packs) continue;
      float y[kPack], z[kPack], g[kPack], w[kPack], dy[kPack], dz[kPack];
      unpack<bf16>(ys[i], y);
      unpack<bf16>(zs[i], z);
      unpack<bf16>(gs[i], g);
      unpack<bf16>(*reinterpret_cast<const uint4*>(weight + pack * kPack), w);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float s = sigmoid(z[j]), gate = z[j] * s, slope = s * (1.0f + z[j] * (1.0f - s));
        if constexpr (kNormFirst) {
          const float n = y[j] * rstd;
          dy[j] = rstd * (g[j] * w[j] * gate) - along * rstd * y[j];
          dz[j] = g[j] * w[j] * n * slope;
          dweight[i][j] += g[j] * n * gate;
        } else {
          const float v = y[j] * gate, dv = rstd * (g[j] * w[j] - along * v);
          dy[j] = dv * gate;
          dz[j] = dv * y[j] * slope;
          dweight[i][j] += g[j] * v * rstd;
        }
      }
      const int64_t column = group * args.group_size + pack * kPack;
      *reinterpret_cast<uint4*>(to(args.dy, token, sample, column)) = pack_words<bf16>(dy);
      *reinterpret_cast<uint4*>(to(args.dz, token, sample, column)) = pack_words<bf16>(dz);
    }
  }
  float* partial = args.workspace + (run * args.groups + group) * args.group_size;
  if constexpr (kLanes > 0) {
    if (args.shared_weight) {
      sum_over_teams<kLanes>(dweight[0]);
      if (threadIdx.x >= lanes) return;
      partial = args.workspace + blockIdx.x * args.group_size;
    }
  }
  if (run >= runs) return;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned pack = lane + i * lanes;
    if (pack < packs) store_run(partial + pack * kPack, dweight[i]);
  }
}

// f(lanes or 0, packs of a thread) and the threads of a block for a group of that size.
template <class F>
void with_team(int64_t group_size, F&& f) {
  const int64_t packs = group_size / kPack;
  using std::integral_constant;
  const auto small = [&](auto lanes) {
    f(lanes, integral_constant<int, 1>(), static_cast<unsigned>(kSmallBlock));
  };
  if (packs <= 8) return small(integral_constant<int, 8>());
  if (packs <= 16) return small(integral_constant<int, 16>());
  if (packs <= 32) return small(integral_constant<int, 32>());
  const auto threads = [&](int64_t each) {
    return static_cast<unsigned>(((packs + each - 1) / each + 31) / 32 * 32);
  };
  if (packs <= kLargeBlock)
    return f(integral_constant<int, 0>(), integral_constant<int, 1>(), threads(1));
  f(integral_constant<int, 0>(), integral_constant<int, 2>(), threads(2));
}
unsigned teams_of_block(int lanes, unsigned threads) { return lanes ? threads / lanes : 1; }
unsigned blocks_of_teams(int64_t teams, unsigned each) {
  return static_cast<unsigned>((teams + each - 1) / each);
}

// Runs of rows of the backward: enough teams for the device, few enough that their sums cost
// little.
int64_t backward_runs(const GatedNormArgs& args) {
  int64_t teams = 0;
  with_team(args.group_size, [&](auto lanes, auto, unsigned threads) {
    teams = int64_t{132} * (lanes ? kSmallResident : kLargeResident) / threads *
            teams_of_block(lanes, threads);
  });
  return std::max<int64_t>(1, std::min(teams / args.groups, args.tokens * args.samples));
}

}  // namespace

int64_t gated_norm_workspace(const GatedNormArgs& args) {
  return backward_runs(args) * args.groups * args.group_size;
}

void gated_norm_forward_cuda(const GatedNormArgs& args, void* stream) {
  const int64_t teams = args.tokens * args.samples * args.groups;
  if (teams == 0) return;
  with_team(args.group_size, [&](auto lanes, auto packs, unsigned threads) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(packs)::value;
    const unsigned blocks = blocks_of_teams(teams, teams_of_block(kLanes, threads));
    auto* const kernel =
        args.norm_first ? norm_forward<kLanes, kPacks, true> : norm_forward<kLanes, kPacks, false>;
    kernel<<<blocks, threads, 0, as_stream(stream)>>>(args);
  });
  check_cuda(cudaGetLastError(), "the gated norm of a state-space layer");
}

void gated_norm_backward_cuda(const GatedNormArgs& args, void* stream) {
  const int64_t runs = backward_runs(args);
  unsigned blocks = 0;
  with_team(args.group_size, [&](auto lanes, auto packs, unsigned threads) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(packs)::value;
    blocks = blocks_of_teams(runs * args.groups, teams_of_block(kLanes, threads));
    auto* const kernel = args.norm_first ? norm_backward<kLanes, kPacks, true>
                                         : norm_backward<kLanes, kPacks, false>;
    kernel<<<blocks, threads, 0, as_stream(stream)>>>(args, static_cast<unsigned>(runs));
  });
  check_cuda(cudaGetLastError(), "the backward of the gated norm of a state-space layer");
  PartialSum sum;
  sum.blocks = args.shared_weight ? blocks : runs;
  sum.columns = args.shared_weight ? args.group_size : args.groups * args.group_size;
  sum.partial = args.workspace;
  sum.beta = 0.0;
  sum.target = args.dweight;
  partial_sum_cuda(sum, stream);
}

}  // namespace megatron
