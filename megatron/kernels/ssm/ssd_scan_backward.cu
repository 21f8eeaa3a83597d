// Note [Backward of the scan of Mamba-2]
// Two kernels. The first walks the sequence once forward for the states before each chunk of 128
// tokens and once backward for the gradients G of the states after it; both go to memory as bf16.
// In the second a block has one chunk of one group: it takes the heads of the group in turn, so
// that C B^T is computed once and the gradients of B and C are sums in registers. With the sums c
// of dt A, L_ij = exp(c_i - c_j), v_j = exp(c_end - c_j), e_i = exp(c_i), M = dy x^T (all per
// head):
//
//   dx_j = dt_j (sum_i (C B^T)_ij L_ij dy_i + v_j G B_j) + D dy_j
//   dB_j = dt_j (sum_i M_ij L_ij C_i + v_j G^T x_j)
//   dC_i = sum_j M_ij L_ij dt_j B_j + e_i S^T dy_i
//   s_j  = sum_i M_ij (C B^T)_ij L_ij + v_j x_j . G B_j
//   dc_i = sum_j M_ij (C B^T)_ij L_ij dt_j + e_i C_i . S^T dy_i - dt_i s_i
//   dc_end = sum_j dt_j v_j x_j . G B_j + exp(c_end) <G, S>
//   ddt_t = A r_t + s_t,  dA = sum_t dt_t r_t,  r_t = dc_end + sum_{i >= t} dc_i
//
// Tiles have rows j and columns i, so that what the products with rows j need lies in registers; M
// o L goes through shared memory for dC.
#include <algorithm>

#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/detail/sm90.cuh"
#include "megatron/kernels/detail/ssd_chunk.cuh"
#include "megatron/kernels/detail/ssd_states.cuh"
#include "megatron/kernels/ssm/ssd_scan_backward.h"

namespace megatron {
namespace {

using namespace sm90;
using namespace ssd;

struct GradientParams {
  CUtensorMap x, dy, b, c, dx, states, gradients;
  StepSource steps;
  const float* d;
  __nv_bfloat16 *db, *dc;
  int64_t db_token, db_sample, dc_token, dc_sample;
  float* partial_bc;  // [splits, 2, samples, tokens, G, N], or null: one split
  float* ddt;
  float *partial_a, *partial_d;  // [samples, spans, H]
  int tokens, samples, spans, heads, groups, heads_per_block, splits, parts, columns;
};

// What a span's tokens weigh, for one head.
struct SpanDecays {
  float sum[kSpan];    // running sum of dt A log2(e)
  float step[kSpan];   // dt
  float keep[kSpan];   // e, 0 behind a border
  float until[kSpan];  // v, 0 before the last border
  float decay;         // of the state over the span
  float padding[3];
};
// What the sums of one head leave for the gradients of dt and A.
struct SpanSums {
  float of_source[kSpan];     // s
  float of_state[kSpan];      // e_i C_i . S^T dy_i
  float of_column[8][kSpan];  // by warps: sum_j M (C B^T) L dt_j; of warps 4-7 the second half
  float at_end[8], product[8], of_d[8];  // by warps: sum dt v x . G B;  <G, S>;  sum dy . x
};

template <int kN>
struct GradientShape {
  static constexpr int kPanels = kN / kPanelColumns;
  static constexpr int kStages = 2;
  static constexpr int kTile = 2 * kPanel;              // 128 rows of 64 columns
  static constexpr int kBytesBC = kTile * kPanels;      // B, or C
  static constexpr int kStageBytes = 2 * kTile;         // x, dy
  static constexpr int kStateBytes = kPanel * kPanels;  // S, or G
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kSharedBytes = 1024 + 2 * kBytesBC + kStages * kStageBytes +
                                      2 * kStateBytes + 2 * 3 * kPanel +
                                      kStages * static_cast<int>(sizeof(SpanDecays)) +
                                      static_cast<int>(sizeof(SpanSums)) + 4 * kSpan + 128;
};

template <int kN>
struct Tiles {
  uint32_t b, c, stages, state, gradient, weighted;  // weighted: M o L dt, blocks 00, 01, 11
  __device__ __forceinline__ explicit Tiles(uint32_t base) {
    using Shape = GradientShape<kN>;
    b = base, c = b + Shape::kBytesBC, stages = c + Shape::kBytesBC;
    state = stages + Shape::kStages * Shape::kStageBytes;
    gradient = state + Shape::kStateBytes, weighted = gradient + Shape::kStateBytes;
  }
  __device__ __forceinline__ uint32_t x(int stage) const {
    return stages + stage * GradientShape<kN>::kStageBytes;
  }
  __device__ __forceinline__ uint32_t dy(int stage) const {
    return x(stage) + GradientShape<kN>::kTile;
  }
};

// Adds over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

template <int kN>
__global__ void __launch_bounds__(GradientShape<kN>::kThreads, 1)
    scan_gradients(const __grid_constant__ GradientParams p) {
  using Shape = GradientShape<kN>;
  constexpr int kPanels = Shape::kPanels, kStages = Shape::kStages, kTile = Shape::kTile;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  const Tiles<kN> tile(base);
  uint4* const scores = reinterpret_cast<uint4*>(shared + (tile.weighted + 3 * kPanel - base));
  unsigned char* const behind = reinterpret_cast<unsigned char*>(scores) + 3 * kPanel;
  SpanDecays* const decays = reinterpret_cast<SpanDecays*>(behind);
  SpanSums& sums = *reinterpret_cast<SpanSums*>(decays + kStages);
  int* const starts = reinterpret_cast<int*>(&sums + 1);
  const uint32_t barriers = shared_address(starts + kSpan);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 16 + 8 * stage; };
  const uint32_t states_full = barriers + 32, states_empty = barriers + 40, bc_full = barriers + 48;
  const uint32_t sums_full = barriers + 56, sums_empty = barriers + 64;
  const auto generic = [&](uint32_t address) { return shared + (address - base); };

  const int span = blockIdx.x, group = blockIdx.y % p.groups, split = blockIdx.y / p.groups;
  const int sample = blockIdx.z, token0 = span * kSpan;
  const int first_head = group * (p.heads / p.groups) + split * p.heads_per_block;
  const int items = p.heads_per_block * p.parts;  // columns of 64 of x
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1 + 32);
      barrier_init(empty(i), 3);
    }
    barrier_init(states_full, 1);
    barrier_init(states_empty, 8);
    barrier_init(bc_full, 1);
    barrier_init(sums_full, 2 * kGroupThreads);
    barrier_init(sums_empty, 32);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<40>();
    if (warp == 0 && lane == 0) {
      barrier_expect(bc_full, 2 * Shape::kBytesBC);
      for (int panel = 0; panel < kPanels; ++panel) {
        const int at = group * kN + panel * kPanelColumns;
        for (int half = 0; half < 2; ++half) {
          const int to = panel * kTile + half * kPanel, token = token0 + half * kChunk;
          load_panel(tile.b + to, &p.b, bc_full, at, sample, token);
          load_panel(tile.c + to, &p.c, bc_full, at, sample, token);
        }
      }
      for (int i = 0; i < items; ++i) {
        const int stage = i % kStages, column = first_head * p.parts + i;
        barrier_wait(empty(stage), (i / kStages & 1) ^ 1);
        barrier_expect(full(stage), Shape::kStageBytes);
        for (int half = 0; half < 2; ++half) {
          const int token = token0 + half * kChunk;
          load_panel(tile.x(stage) + half * kPanel, &p.x, full(stage), column * kPanelColumns,
                     sample, token);
          load_panel(tile.dy(stage) + half * kPanel, &p.dy, full(stage), column * kPanelColumns,
                     sample, token);
        }
        barrier_wait(states_empty, (i & 1) ^ 1);
        barrier_expect(states_full, 2 * Shape::kStateBytes);
        const int row = ((sample * p.spans + span) * p.columns + column) * 64;
        for (int panel = 0; panel < kPanels; ++panel) {
          load_panel(tile.state + panel * kPanel, &p.states, states_full, panel * kPanelColumns, 0,
                     row);
          load_panel(tile.gradient + panel * kPanel, &p.gradients, states_full,
                     panel * kPanelColumns, 0, row);
        }
      }
    } else if (warp == 1) {
      // The decays of 128 tokens, two after two of a lane in each half.
      for (int i = 0; i < items; ++i) {
        const int stage = i % kStages, head = first_head + i / p.parts;
        const HeadSteps steps(p.steps, head, sample);
        RawSteps both[2] = {steps.fetch(2 * span, lane), steps.fetch(2 * span + 1, lane)};
        const LaneDecays low(both[0], steps.a, lane), high(both[1], steps.a, lane);
        const int last = high.last >= 0 ? high.last + kChunk : low.last;
        const float total = low.total + high.total;
        barrier_wait(empty(stage), (i / kStages & 1) ^ 1);
        SpanDecays& out = decays[stage];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = 2 * lane + j;
          const float sum = low.total + high.sum[j];
          const int start_low = low.start[j];
          const int start_high = high.start[j] >= 0 ? high.start[j] + kChunk : low.last;
          out.sum[at] = low.sum[j];
          out.sum[at + kChunk] = sum;
          out.step[at] = low.step[j];
          out.step[at + kChunk] = high.step[j];
          out.keep[at] = start_low < 0 ? exp2f(low.sum[j]) : 0.0f;
          out.keep[at + kChunk] = start_high < 0 ? exp2f(sum) : 0.0f;
          out.until[at] = at >= last ? exp2f(fminf(total - low.sum[j], 0.0f)) : 0.0f;
          out.until[at + kChunk] = at + kChunk >= last ? exp2f(fminf(total - sum, 0.0f)) : 0.0f;
          if (i == 0) {  // the same for all heads
            starts[at] = start_low;
            starts[at + kChunk] = start_high;
          }
        }
        if (lane == 0) out.decay = last < 0 ? exp2f(total) : 0.0f;
        barrier_arrive(full(stage));
      }
    } else if (warp == 2) {
      // Gradients of dt and A; lane l has tokens 4 l to 4 l + 3.
      float ddt[4] = {}, da = 0.0f, dd = 0.0f;
      for (int i = 0; i < items; ++i) {
        const int stage = i % kStages, head = first_head + i / p.parts;
        barrier_wait(sums_full, i & 1);
        const SpanDecays& of = decays[stage];
        float change[4], source[4], step[4];
        const float4 steps4 = *reinterpret_cast<const float4*>(of.step + 4 * lane);
        step[0] = steps4.x, step[1] = steps4.y, step[2] = steps4.z, step[3] = steps4.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int t = 4 * lane + j;
          source[j] = sums.of_source[t];
          change[j] = sums.of_state[t] - step[j] * source[j];
          for (int w = 0; w < (t < kChunk ? 4 : 8); ++w) change[j] += sums.of_column[w][t];
        }
        float end = 0.0f, product = 0.0f, of_d = 0.0f;
        for (int w = 0; w < 8; ++w) {
          end += sums.at_end[w];
          product += sums.product[w];
          of_d += sums.of_d[w];
        }
        end += of.decay * product;
        // Sums from each token to the last.
        change[2] += change[3];
        change[1] += change[2];
        change[0] += change[1];
        float after = change[0];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const float other = __shfl_down_sync(0xffffffffu, after, offset);
          if (lane + offset < 32) after += other;
        }
        after = __shfl_down_sync(0xffffffffu, after, 1);
        if (lane == 31) after = 0.0f;
        after += end;
        const float a = p.steps.a[head];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float all = change[j] + after;
          ddt[j] += a * all + source[j];
          da += step[j] * all;
        }
        dd += of_d;
        barrier_arrive(sums_empty);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(stage));
        if (i % p.parts == p.parts - 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int token = token0 + 4 * lane + j;
            if (token < p.tokens)
              p.ddt[(static_cast<int64_t>(token) * p.samples + sample) * p.heads + head] = ddt[j];
            ddt[j] = 0.0f;
          }
          da = warp_sum(da);
          const int64_t to = (static_cast<int64_t>(sample) * p.spans + span) * p.heads + head;
          if (lane == 0) p.partial_a[to] = da, p.partial_d[to] = dd;
          da = dd = 0.0f;
        }
      }
    }
    return;
  }

  take_registers<232>();
  // For each warpgroup by itself: what it multiplies is known to the compiler then.
  const auto consume = [&](auto which) {
    constexpr int mine = decltype(which)::value;  // rows j, and rows i of dC: the half of the span
    const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);  // in the half; and row + 8
    const int row0 = mine * kChunk + row, row1 = row0 + 8;        // in the span
    const int matrix = lane / 8, line = lane % 8;
    const int write_row = 16 * warp + (matrix % 2) * 8 + line;
    const int all_warp = 4 * mine + warp;
    const uint32_t my_half = mine * kPanel;

    // (C B^T) with rows j, as bf16 in the places of the thread.
    barrier_wait(bc_full, 0);
#pragma unroll
    for (int half = mine; half < 2; ++half) {
      float all[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kN / 16; ++k) {
        const uint32_t at = k / 4 * kTile + k % 4 * 32;
        wgmma<0, 0>(all, k_major(tile.b + at + my_half), k_major(tile.c + at + half * kPanel),
                    k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(all);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* const t = all + 8 * k;
        scores[((mine + half) * 4 + k) * kGroupThreads + thread] =
            uint4{pack2(t[0], t[1]), pack2(t[2], t[3]), pack2(t[4], t[5]), pack2(t[6], t[7])};
      }
    }

    float db[kN / 2], dc[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) db[i] = dc[i] = 0.0f;

    for (int item = 0; item < items; ++item) {
      const Tiles<kN> tile(used_here(base));
      const int stage = item % kStages, head = first_head + item / p.parts;
      const float d = p.d ? p.d[head] : 0.0f;
      barrier_wait(full(stage), item / kStages & 1);
      barrier_wait(states_full, item & 1);
      const SpanDecays& of = decays[stage];
      const uint32_t x_tile = tile.x(stage) + my_half, dy_tile = tile.dy(stage);
      const float sum0 = of.sum[row0], sum1 = of.sum[row1];
      const float step0 = of.step[row0], step1 = of.step[row1];
      const float until0 = of.until[row0], until1 = of.until[row1];
      float product = 0.0f, at_end, of_state0 = 0.0f, of_state1 = 0.0f;
      // dC from the state before, e_i S^T dy_i, 64 columns at a time.
      const float keep0 = of.keep[row0], keep1 = of.keep[row1];
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        float part[32];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<0, 1>(part, k_major(dy_tile + my_half + 32 * k),
                      mn_major(tile.state + panel * kPanel + k * 16 * kPanelRowBytes, kPanel),
                      k > 0);
        wgmma_commit();
        // <G, S>, a part of each thread.
        const uint4* const s = reinterpret_cast<const uint4*>(generic(tile.state + panel * kPanel));
        const uint4* const g =
            reinterpret_cast<const uint4*>(generic(tile.gradient + panel * kPanel));
#pragma unroll
        for (int i = 0; i < kPanel / 16 / (2 * kGroupThreads); ++i) {
          const int at = i * 2 * kGroupThreads + mine * kGroupThreads + thread;
          const uint4 s4 = s[at], g4 = g[at];
          product += low_of(s4.x) * low_of(g4.x) + high_of(s4.x) * high_of(g4.x);
          product += low_of(s4.y) * low_of(g4.y) + high_of(s4.y) * high_of(g4.y);
          product += low_of(s4.z) * low_of(g4.z) + high_of(s4.z) * high_of(g4.z);
          product += low_of(s4.w) * low_of(g4.w) + high_of(s4.w) * high_of(g4.w);
        }
        wgmma_wait<0>();
        wgmma_pin(part);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned char* const c = generic(tile.c + my_half + panel * kTile) + 2 * pair;
          const uint32_t c0 = *reinterpret_cast<const uint32_t*>(c + panel_piece(row, i)),
                         c1 = *reinterpret_cast<const uint32_t*>(c + panel_piece(row + 8, i));
          of_state0 += low_of(c0) * part[4 * i] + high_of(c0) * part[4 * i + 1];
          of_state1 += low_of(c1) * part[4 * i + 2] + high_of(c1) * part[4 * i + 3];
          float* const to = dc + 32 * panel + 4 * i;
          to[0] += keep0 * part[4 * i];
          to[1] += keep0 * part[4 * i + 1];
          to[2] += keep1 * part[4 * i + 2];
          to[3] += keep1 * part[4 * i + 3];
        }
      }
      of_state0 = keep0 * row_sum(of_state0);
      of_state1 = keep1 * row_sum(of_state1);
      // From the state after: v_j G B_j for dx, dt_j v_j G^T x_j for dB.
      float dx[32];
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // Rows of x, so not transposed: matrices (rows, k), (rows + 8, k), (rows, k + 8), ...
        load_matrices(a[k], x_tile + panel_piece(write_row, 2 * k + matrix / 2));
        const float w0 = step0 * until0, w1 = step1 * until1;
        a[k][0] = pack2(low_of(a[k][0]) * w0, high_of(a[k][0]) * w0);
        a[k][1] = pack2(low_of(a[k][1]) * w1, high_of(a[k][1]) * w1);
        a[k][2] = pack2(low_of(a[k][2]) * w0, high_of(a[k][2]) * w0);
        a[k][3] = pack2(low_of(a[k][3]) * w1, high_of(a[k][3]) * w1);
      }
      wgmma_pin(db);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kN / 16; ++k)
        wgmma<0, 0>(dx, k_major(tile.b + my_half + k / 4 * kTile + k % 4 * 32),
                    k_major(tile.gradient + k / 4 * kPanel + k % 4 * 32), k > 0);
      wgmma_commit();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(db, a[k], mn_major(tile.gradient + k * 16 * kPanelRowBytes, kPanel), 1);
      wgmma_commit();
      wgmma_wait<1>();
      wgmma_pin(dx);
      float source0 = 0.0f, source1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned char* const x = generic(x_tile) + 2 * pair;
        const uint32_t x0 = *reinterpret_cast<const uint32_t*>(x + panel_piece(row, i)),
                       x1 = *reinterpret_cast<const uint32_t*>(x + panel_piece(row + 8, i));
        source0 += low_of(x0) * dx[4 * i] + high_of(x0) * dx[4 * i + 1];
        source1 += low_of(x1) * dx[4 * i + 2] + high_of(x1) * dx[4 * i + 3];
        dx[4 * i] *= until0, dx[4 * i + 1] *= until0;
        dx[4 * i + 2] *= until1, dx[4 * i + 3] *= until1;
      }
      source0 *= until0, source1 *= until1;  // of this thread's columns
      at_end = step0 * source0 + step1 * source1;
      wgmma_wait<0>();
      wgmma_pin(db);
      __syncwarp();
      if (lane == 0) barrier_arrive(states_empty);

      // Room for the sums of this head.
      barrier_wait(sums_empty, (item & 1) ^ 1);
      float of_d = 0.0f;
#pragma unroll
      for (int half = mine; half < 2; ++half) {
        float m[32];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<0, 0>(m, k_major(x_tile + 32 * k), k_major(dy_tile + half * kPanel + 32 * k),
                      k > 0);
        wgmma_commit();
        // The other warpgroup has read what it needs of the block of the head before.
        if (half > mine && item > 0) named_barrier(2, 2 * kGroupThreads);
        wgmma_wait<0>();
        wgmma_pin(m);
        const bool diagonal = half == mine;
        const uint32_t block = tile.weighted + (mine + half) * kPanel;
        uint32_t w[4][4];  // (C B^T) o L
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (diagonal && k < warp) {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[k][i] = a[k][i] = 0;
            if (lane < 4) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
                sums.of_column[all_warp][half * kChunk + 16 * k + 4 * lane + i] = 0.0f;
            }
          } else {
            const uint4 cb4 = scores[((mine + half) * 4 + k) * kGroupThreads + thread];
            const uint32_t cb[4] = {cb4.x, cb4.y, cb4.z, cb4.w};
#pragma unroll
            for (int part = 0; part < 2; ++part) {
              const int local = 16 * k + 8 * part + pair, i = half * kChunk + local;
              const float2 sum = *reinterpret_cast<const float2*>(of.sum + i);
              const int2 start = *reinterpret_cast<const int2*>(starts + i);
              float l[4] = {
                  exp2_fast(fminf(sum.x - sum0, 0.0f)), exp2_fast(fminf(sum.y - sum0, 0.0f)),
                  exp2_fast(fminf(sum.x - sum1, 0.0f)), exp2_fast(fminf(sum.y - sum1, 0.0f))};
              float* const mm = m + 8 * k + 4 * part;
              if (diagonal && k == warp) {
                if (local == row) of_d += mm[0];
                if (local + 1 == row) of_d += mm[1];
                if (local == row + 8) of_d += mm[2];
                if (local + 1 == row + 8) of_d += mm[3];
                if (local < row) l[0] = 0.0f;
                if (local + 1 < row) l[1] = 0.0f;
                if (local < row + 8) l[2] = 0.0f;
                if (local + 1 < row + 8) l[3] = 0.0f;
              }
              if (start.x > row0) l[0] = 0.0f;
              if (start.y > row0) l[1] = 0.0f;
              if (start.x > row1) l[2] = 0.0f;
              if (start.y > row1) l[3] = 0.0f;
              const float cb00 = low_of(cb[2 * part]) * l[0], cb01 = high_of(cb[2 * part]) * l[1];
              const float cb10 = low_of(cb[2 * part + 1]) * l[2],
                          cb11 = high_of(cb[2 * part + 1]) * l[3];
              const float t00 = mm[0] * cb00, t01 = mm[1] * cb01, t10 = mm[2] * cb10,
                          t11 = mm[3] * cb11;
              source0 += t00 + t01;
              source1 += t10 + t11;
              // Over the rows of this warp: lanes with the same columns.
              float column0 = step0 * t00 + step1 * t10, column1 = step0 * t01 + step1 * t11;
              column0 += __shfl_xor_sync(0xffffffffu, column0, 4);
              column1 += __shfl_xor_sync(0xffffffffu, column1, 4);
              column0 += __shfl_xor_sync(0xffffffffu, column0, 8);
              column1 += __shfl_xor_sync(0xffffffffu, column1, 8);
              column0 += __shfl_xor_sync(0xffffffffu, column0, 16);
              column1 += __shfl_xor_sync(0xffffffffu, column1, 16);
              if (lane < 4)
                *reinterpret_cast<float2*>(&sums.of_column[all_warp][i]) =
                    make_float2(column0, column1);
              w[k][2 * part] = pack2(cb00, cb01);
              w[k][2 * part + 1] = pack2(cb10, cb11);
              a[k][2 * part] = pack2(mm[0] * l[0] * step0, mm[1] * l[1] * step0);
              a[k][2 * part + 1] = pack2(mm[2] * l[2] * step1, mm[3] * l[3] * step1);
            }
          }
          store_matrices(block + panel_piece(write_row, 2 * k + matrix / 2), a[k][0], a[k][1],
                         a[k][2], a[k][3]);
        }
        async_fence();
        wgmma_pin(dx);
        wgmma_pin(db);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<1>(dx, w[k], mn_major(dy_tile + half * kPanel + k * 16 * kPanelRowBytes, kPanel),
                   1);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<1>(db, a[k], mn_major(tile.c + half * kPanel + k * 16 * kPanelRowBytes, kTile), 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(dx);
        wgmma_pin(db);
      }
      // dC: rows i of this half from the blocks with columns i.
      named_barrier(3 + mine, kGroupThreads);
      if constexpr (mine == 0)
        named_arrive(5, 2 * kGroupThreads);
      else
        named_barrier(5, 2 * kGroupThreads);
      wgmma_pin(dc);
      wgmma_begin();
#pragma unroll
      for (int half = 0; half <= mine; ++half) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<1, 1>(
              dc,
              mn_major(tile.weighted + (mine + half) * kPanel + k * 16 * kPanelRowBytes, kPanel),
              mn_major(tile.b + half * kPanel + k * 16 * kPanelRowBytes, kTile), 1);
      }
      wgmma_commit();

      // dx, in the place of x.
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned char* const dy = generic(dy_tile + my_half) + 2 * pair;
        const uint32_t dy0 = *reinterpret_cast<const uint32_t*>(dy + panel_piece(row, i)),
                       dy1 = *reinterpret_cast<const uint32_t*>(dy + panel_piece(row + 8, i));
        dx[4 * i] = step0 * dx[4 * i] + d * low_of(dy0);
        dx[4 * i + 1] = step0 * dx[4 * i + 1] + d * high_of(dy0);
        dx[4 * i + 2] = step1 * dx[4 * i + 2] + d * low_of(dy1);
        dx[4 * i + 3] = step1 * dx[4 * i + 3] + d * high_of(dy1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const v = dx + 8 * i;
        store_matrices(x_tile + panel_piece(write_row, 2 * i + matrix / 2), pack2(v[0], v[1]),
                       pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
      }
      async_fence();
      source0 = row_sum(source0);
      source1 = row_sum(source1);
      at_end = warp_sum(at_end);
      product = warp_sum(product);
      of_d = warp_sum(of_d);
      if (lane % 4 == 0) {
        sums.of_source[row0] = source0, sums.of_source[row1] = source1;
        sums.of_state[row0] = of_state0, sums.of_state[row1] = of_state1;
      }
      if (lane == 0) {
        sums.at_end[all_warp] = at_end, sums.product[all_warp] = product;
        sums.of_d[all_warp] = of_d;
      }
      barrier_arrive(sums_full);
      wgmma_wait<0>();
      wgmma_pin(dc);
      if (mine == 1 && item + 1 < items) named_arrive(2, 2 * kGroupThreads);
      named_barrier(3 + mine, kGroupThreads);
      if (thread == 0) {
        store_panel(&p.dx, x_tile, (first_head * p.parts + item) * kPanelColumns, sample,
                    token0 + mine * kChunk);
        stores_commit();
        stores_read();
        barrier_arrive(empty(stage));
      }
    }
    if (thread == 0) stores_done();

    const auto write = [&](const float (&from)[kN / 2], __nv_bfloat16* to, int64_t token_stride,
                           int64_t sample_stride, int which) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = token0 + (r == 0 ? row0 : row1);
        if (token >= p.tokens) continue;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
          const float low = from[4 * i + 2 * r], high = from[4 * i + 2 * r + 1];
          const int column = group * kN + 8 * i + pair;
          if (p.partial_bc) {
            const int64_t at =
                (((static_cast<int64_t>(split) * 2 + which) * p.samples + sample) * p.tokens +
                 token) *
                    p.groups * kN +
                column;
            *reinterpret_cast<float2*>(p.partial_bc + at) = make_float2(low, high);
          } else {
            *reinterpret_cast<uint32_t*>(to + token * token_stride + sample * sample_stride +
                                         column) = pack2(low, high);
          }
        }
      }
    };
    write(db, p.db, p.db_token, p.db_sample, 0);
    write(dc, p.dc, p.dc_token, p.dc_sample, 1);
  };
  if (warpgroup == 1)
    consume(std::integral_constant<int, 0>());
  else
    consume(std::integral_constant<int, 1>());
}

// Sums of the splits, in order.
__global__ void sum_splits(const __grid_constant__ GradientParams p, int64_t columns) {
  const int64_t pairs = int64_t{2} * p.samples * p.tokens * columns / 2;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs;
       i += int64_t{gridDim.x} * blockDim.x) {
    float2 total{0.0f, 0.0f};
    for (int split = 0; split < p.splits; ++split) {
      const float2 part = *reinterpret_cast<const float2*>(p.partial_bc + 2 * (split * pairs + i));
      total.x += part.x, total.y += part.y;
    }
    const int64_t column = 2 * i % columns, row = 2 * i / columns;
    const int64_t token = row % p.tokens, sample = row / p.tokens % p.samples;
    __nv_bfloat16* const to = row / p.tokens / p.samples == 0
                                  ? p.db + token * p.db_token + sample * p.db_sample + column
                                  : p.dc + token * p.dc_token + sample * p.dc_sample + column;
    *reinterpret_cast<uint32_t*>(to) = pack2(total.x, total.y);
  }
}

// So many blocks share the heads of a group that all multiprocessors have work.
int64_t splits_of(const SsdScanArgs& scan) {
  const int64_t heads = scan.heads / scan.groups;
  int64_t splits = 1;
  while (spans_of(scan) * scan.groups * scan.samples * splits < 256 && heads % (2 * splits) == 0)
    splits *= 2;
  return splits;
}
int64_t state_bytes(const SsdScanArgs& scan) {
  return scan.samples * spans_of(scan) * scan.heads * scan.head_size * scan.state_size * 2;
}
int64_t partial_floats(const SsdScanArgs& scan) {
  return scan.samples * spans_of(scan) * scan.heads;
}
int64_t split_floats(const SsdScanArgs& scan) {
  const int64_t splits = splits_of(scan);
  return splits == 1 ? 0 : splits * 2 * scan.samples * scan.tokens * scan.groups * scan.state_size;
}

template <int kN>
void run_backward(const SsdScanBackwardArgs& args, cudaStream_t stream) {
  const SsdScanArgs& scan = args.scan;
  const int64_t spans = spans_of(scan), columns = scan.heads * (scan.head_size / 64);
  char* const workspace = static_cast<char*>(args.workspace);
  void* const states = workspace;
  void* const gradients = workspace + state_bytes(scan);
  float* const partial = reinterpret_cast<float*>(workspace + 2 * state_bytes(scan));
  const auto map = [&](const ScanRows& rows, int64_t of) {
    return panel_map(rows.data, of, scan.samples, scan.tokens, rows.sample, rows.token, kChunk);
  };
  const auto state_map = [&](void* data) {
    return panel_map(data, kN, 1, scan.samples * spans * columns * 64, kN, kN, 64);
  };
  const int64_t x_columns = scan.heads * scan.head_size, b_columns = scan.groups * kN;
  ScanStates walk;
  walk.x = map(scan.x, x_columns);
  walk.dy = map(args.dy, x_columns);
  walk.b = map(scan.b, b_columns);
  walk.c = map(scan.c, b_columns);
  walk.states = state_map(states);
  walk.gradients = state_map(gradients);
  compute_states(args, walk, stream);

  GradientParams p{};
  p.x = walk.x, p.dy = walk.dy, p.b = walk.b, p.c = walk.c;
  p.dx = map(args.dx, x_columns);
  p.states = walk.states, p.gradients = walk.gradients;
  p.steps = step_source(scan);
  p.d = scan.d;
  p.db = static_cast<__nv_bfloat16*>(args.db.data),
  p.dc = static_cast<__nv_bfloat16*>(args.dc.data);
  p.db_token = args.db.token, p.db_sample = args.db.sample;
  p.dc_token = args.dc.token, p.dc_sample = args.dc.sample;
  p.splits = static_cast<int>(splits_of(scan));
  p.partial_a = partial, p.partial_d = partial + partial_floats(scan);
  p.partial_bc = p.splits > 1 ? partial + 2 * partial_floats(scan) : nullptr;
  p.ddt = args.ddt;
  p.tokens = static_cast<int>(scan.tokens), p.samples = static_cast<int>(scan.samples);
  p.spans = static_cast<int>(spans), p.heads = static_cast<int>(scan.heads);
  p.groups = static_cast<int>(scan.groups), p.parts = static_cast<int>(scan.head_size / 64);
  p.columns = static_cast<int>(columns);
  p.heads_per_block = p.heads / p.groups / p.splits;
  constexpr int kBytes = GradientShape<kN>::kSharedBytes;
  static_assert(kBytes <= 232448);
  check_cuda(
      cudaFuncSetAttribute(scan_gradients<kN>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "cudaFuncSetAttribute");
  scan_gradients<kN>
      <<<dim3(static_cast<unsigned>(spans), static_cast<unsigned>(scan.groups * p.splits),
              static_cast<unsigned>(scan.samples)),
         GradientShape<kN>::kThreads, kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "the gradients of the scan of Mamba-2");
  if (p.splits > 1) {
    sum_splits<<<blocks_for(scan.samples * scan.tokens * b_columns), kThreads, 0, stream>>>(
        p, b_columns);
    check_cuda(cudaGetLastError(), "sums of the scan of Mamba-2");
  }
  PartialSum sum;
  sum.blocks = scan.samples * spans;
  sum.columns = scan.heads;
  sum.beta = 0.0;
  sum.partial = p.partial_a, sum.target = args.da;
  partial_sum_cuda(sum, stream);
  if (!args.dd) return;
  sum.partial = p.partial_d, sum.target = args.dd;
  partial_sum_cuda(sum, stream);
}

}  // namespace

int64_t ssd_scan_workspace(const SsdScanBackwardArgs& args) {
  return 2 * state_bytes(args.scan) + 4 * (2 * partial_floats(args.scan) + split_floats(args.scan));
}

void ssd_scan_backward_cuda(const SsdScanBackwardArgs& args, void* stream) {
  if (args.scan.state_size == 64)
    run_backward<64>(args, as_stream(stream));
  else
    run_backward<128>(args, as_stream(stream));
}

}  // namespace megatron
