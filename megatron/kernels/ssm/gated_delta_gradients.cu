// Note [Gradients of the gated delta rule]
// A block has one chunk of one key head of one sample and takes the heads of values that share it
// in turn, so that the gradients of q and k are sums in registers. With rows i, columns j, the
// states S before and G = dS after the chunk, E and dE of all tokens, and f = 1 / sqrt(K):
//
//   dR = T^T dE,  dv = beta dR,  errors = v - keep (K S)
//   dX = f dO E^T,  dA = -dR E^T below the diagonal,  dKK = beta dA * D
//   dq = (dX * D) K + f keep (dO S^T)
//   dk = (dX * D)^T Q + rest (E G^T) - keep beta (dR S^T) + (dKK + dKK^T) K
//   dbeta = dR . errors + sum_j (dA * D * K K^T)
//
// A sum c_i of g is in D_ij with a plus, in D_ji with a minus, in keep_i, in rest_j with a minus;
// all of them are in the end of the chunk: dg_t = sum of dc_i over i >= t, and what the end gives.
//
// Warpgroups: producer; one has dq, and of dk what does not pass through A; one has the rest.
#include <cmath>

#include "megatron/kernels/detail/delta_tiles.cuh"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron::delta {
namespace {

using namespace sm90;

struct GradientParams {
  CUtensorMap q, k, v, dout, dq, dk, dv;
  CUtensorMap states, gradients, writes, write_gradients, inverses;
  ssd::StepSource steps;
  const float* beta;
  float *dg, *dbeta;
  float scale;
  int chunks, value_heads, per_key, columns;
};

// Of one head: what tokens weigh, and what the sums c get.
struct HeadDecays {
  DeltaDecays of;
  float beta[kChunk];
};
struct HeadSums {
  float row[2][kChunk];        // by warpgroups: over columns, and of keep
  float rest[kChunk];          // of rest
  float column[2][4][kChunk];  // by warps: over rows
  float product[8];            // by warps: <G, S>
};

template <int kK>
struct GradientShape {
  static constexpr int kPanels = kK / kPanelColumns;
  static constexpr int kRows = kPanels * kPanel;       // of 64 tokens: q, k, v, dO; E, dE
  static constexpr int kStateBytes = kPanels * kRows;  // S, G
  static constexpr int kHeadBytes = 4 * kRows + 2 * kStateBytes + kPanel;
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kSharedBytes = 1024 + 3 * kRows + kHeadBytes + 2 * kPanel +
                                      static_cast<int>(sizeof(HeadDecays) + sizeof(HeadSums)) + 128;
};

// Adds over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
// Adds over the lanes with the same columns.
__device__ __forceinline__ float column_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 4);
  v += __shfl_xor_sync(0xffffffffu, v, 8);
  return v + __shfl_xor_sync(0xffffffffu, v, 16);
}

template <int kK>
struct Tiles {
  uint32_t q, k, v, dout, e, de, t, s, g;
  uint32_t weighted, dr;  // dX * D and dKK; dR
  __device__ __forceinline__ explicit Tiles(uint32_t base) {
    constexpr int kRows = GradientShape<kK>::kRows, kState = GradientShape<kK>::kStateBytes;
    q = base, k = q + kRows;
    v = k + kRows, dout = v + kRows, e = dout + kRows, de = e + kRows;
    t = de + kRows, s = t + kPanel, g = s + kState;
    weighted = g + kState, dr = weighted + 2 * kPanel;
  }
};

template <int kK>
__global__ void __launch_bounds__(GradientShape<kK>::kThreads, 1)
    delta_gradients(const __grid_constant__ GradientParams p) {
  using Shape = GradientShape<kK>;
  constexpr int kPanels = Shape::kPanels, kRows = Shape::kRows;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = ssd::aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  const Tiles<kK> tile(base);
  HeadDecays& decays = *reinterpret_cast<HeadDecays*>(shared + (tile.dr - base) + kRows);
  HeadSums& sums = *reinterpret_cast<HeadSums*>(&decays + 1);
  const uint32_t keys_full = shared_address(&sums + 1), full = keys_full + 8, empty = full + 8;
  const uint32_t sums_full = empty + 8, sums_empty = sums_full + 8;
  const auto generic = [&](uint32_t address) { return shared + (address - base); };

  const int chunk = blockIdx.x, key_head = blockIdx.y, sample = blockIdx.z;
  const int token0 = chunk * kChunk;
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const auto of_head = [&](int head, int t) {  // in dg, beta, dbeta
    return (static_cast<int64_t>(token0 + t) * p.steps.samples + sample) * p.value_heads + head;
  };
  if (threadIdx.x == 0) {
    barrier_init(keys_full, 1);
    barrier_init(full, 1 + 32);
    barrier_init(empty, 8 + 1);
    barrier_init(sums_full, 2 * kGroupThreads);
    barrier_init(sums_empty, 32);
    barrier_init_fence();
  }
  __syncthreads();
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };

  if (warpgroup == 0) {
    give_registers<40>();
    if (warp == 0 && lane == 0) {
      barrier_expect(keys_full, 2 * kRows);
      for (int i = 0; i < kPanels; ++i) {
        const int at = key_head * kK + i * kPanelColumns;
        load_panel(tile.q + i * kPanel, &p.q, keys_full, at, sample, token0);
        load_panel(tile.k + i * kPanel, &p.k, keys_full, at, sample, token0);
      }
      for (int item = 0; item < p.per_key; ++item) {
        const int head = key_head * p.per_key + item;
        const int chunk_row = (sample * p.chunks + chunk) * p.columns;
        barrier_wait(empty, (item & 1) ^ 1);
        barrier_expect(full, Shape::kHeadBytes);
        load_panel(tile.t, &p.inverses, full, 0, 0,
                   ((sample * p.chunks + chunk) * p.value_heads + head) * 64);
        for (int c = 0; c < kPanels; ++c) {
          const int row = (chunk_row + head * kPanels + c) * 64, to = c * kPanel;
          const int at = head * kK + c * kPanelColumns;
          load_panel(tile.de + to, &p.write_gradients, full, 0, 0, row);
          for (int n = 0; n < kPanels; ++n)
            load_panel(tile.s + c * kRows + n * kPanel, &p.states, full, n * kPanelColumns, 0, row);
          load_panel(tile.v + to, &p.v, full, at, sample, token0);
          load_panel(tile.dout + to, &p.dout, full, at, sample, token0);
          load_panel(tile.e + to, &p.writes, full, 0, 0, row);
          for (int n = 0; n < kPanels; ++n)
            load_panel(tile.g + c * kRows + n * kPanel, &p.gradients, full, n * kPanelColumns, 0,
                       row);
        }
      }
    } else if (warp == 1) {
      for (int item = 0; item < p.per_key; ++item) {
        const int head = key_head * p.per_key + item;
        const ssd::HeadSteps steps(p.steps, head, sample);
        const ssd::LaneDecays mine(steps.fetch(chunk, lane), steps.a, lane);
        float beta[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = 2 * lane + i;
          beta[i] = token0 + t < p.steps.tokens ? p.beta[of_head(head, t)] : 0.0f;
        }
        barrier_wait(empty, (item & 1) ^ 1);
        write_decays(mine, decays.of, lane);
        *reinterpret_cast<float2*>(decays.beta + 2 * lane) = make_float2(beta[0], beta[1]);
        barrier_arrive(full);
      }
    } else if (warp == 2) {
      // Gradients of g; lane l has tokens 2 l and 2 l + 1.
      for (int item = 0; item < p.per_key; ++item) {
        const int head = key_head * p.per_key + item;
        barrier_wait(sums_full, item & 1);
        float change[2], end = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = 2 * lane + i;
          change[i] = sums.row[0][t] + sums.row[1][t] - sums.rest[t];
          for (int w = t / 16; w < 4; ++w) change[i] -= sums.column[0][w][t] + sums.column[1][w][t];
          end += sums.rest[t];
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
          end += __shfl_xor_sync(0xffffffffu, end, offset);
        float product = 0.0f;
        for (int w = 0; w < 8; ++w) product += sums.product[w];
        end += decays.of.decay * product;
        change[0] += change[1];
        float after = change[0];  // sums of this lane and those behind it
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const float other = __shfl_down_sync(0xffffffffu, after, offset);
          if (lane + offset < 32) after += other;
        }
        after = __shfl_down_sync(0xffffffffu, after, 1);
        if (lane == 31) after = 0.0f;
        after += end;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = 2 * lane + i;
          if (token0 + t < p.steps.tokens) p.dg[of_head(head, t)] = change[i] + after;
        }
        barrier_arrive(sums_empty);
        release(empty);
      }
    }
    return;
  }

  take_registers<232>();
  const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
  const int matrix = lane / 8, line = lane % 8;
  const int write_row = 16 * warp + (matrix % 2) * 8 + line;
  const DeltaDecays& of = decays.of;
  // Of a tile of 64 tokens, rows `row` and row + 8, columns 8 i + pair (+ 1) of a panel.
  const auto two_of = [&](uint32_t panel, int of_row, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(generic(panel) + panel_piece(of_row, i) + 2 * pair);
  };
  // <G, S>, a part of each thread.
  const auto part_of_product = [&] {
    const uint4* const s = reinterpret_cast<const uint4*>(generic(tile.s));
    const uint4* const g = reinterpret_cast<const uint4*>(generic(tile.g));
    float product = 0.0f;
#pragma unroll 4
    for (int i = 0; i < Shape::kStateBytes / 16 / (2 * kGroupThreads); ++i) {
      const int at = (2 * i + warpgroup - 1) * kGroupThreads + thread;
      const uint4 s4 = s[at], g4 = g[at];
      product += low_of(s4.x) * low_of(g4.x) + high_of(s4.x) * high_of(g4.x);
      product += low_of(s4.y) * low_of(g4.y) + high_of(s4.y) * high_of(g4.y);
      product += low_of(s4.z) * low_of(g4.z) + high_of(s4.z) * high_of(g4.z);
      product += low_of(s4.w) * low_of(g4.w) + high_of(s4.w) * high_of(g4.w);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      product += __shfl_xor_sync(0xffffffffu, product, offset);
    if (lane == 0) sums.product[4 * (warpgroup - 1) + warp] = product;
  };
  // D of rows row, row + 8 and columns j, j + 1, where j >= 16 warp at most on the diagonal block.
  const auto decays_at = [&](float (&d)[4], int k, int j, bool diagonal) {
    const float2 sum = *reinterpret_cast<const float2*>(of.sum + j);
    const float sum0 = of.sum[row], sum1 = of.sum[row + 8];
    d[0] = exp2_fast(fminf(sum0 - sum.x, 0.0f)), d[1] = exp2_fast(fminf(sum0 - sum.y, 0.0f));
    d[2] = exp2_fast(fminf(sum1 - sum.x, 0.0f)), d[3] = exp2_fast(fminf(sum1 - sum.y, 0.0f));
    if (k == warp) {
      const int last = diagonal ? row : row - 1;
      if (j > last) d[0] = 0.0f;
      if (j + 1 > last) d[1] = 0.0f;
      if (j > last + 8) d[2] = 0.0f;
      if (j + 1 > last + 8) d[3] = 0.0f;
    }
    if (of.has_border) {
      const int start0 = of.start[row], start1 = of.start[row + 8];
      if (j < start0) d[0] = 0.0f;
      if (j + 1 < start0) d[1] = 0.0f;
      if (j < start1) d[2] = 0.0f;
      if (j + 1 < start1) d[3] = 0.0f;
    }
  };
  const auto put_columns = [&](int mine, int j, float low, float high) {
    low = column_sum(low), high = column_sum(high);
    if (lane < 4) *reinterpret_cast<float2*>(&sums.column[mine][warp][j]) = make_float2(low, high);
  };
  barrier_wait(keys_full, 0);

  if (warpgroup == 1) {
    float dq[kK / 2], dk[kK / 2];
#pragma unroll
    for (int i = 0; i < kK / 2; ++i) dq[i] = dk[i] = 0.0f;
    for (int item = 0; item < p.per_key; ++item) {
      const Tiles<kK> tile(used_here(base));
      barrier_wait(full, item & 1);
      barrier_wait(sums_empty, (item & 1) ^ 1);
      float row0 = 0.0f, row1 = 0.0f;
      {
        uint32_t a[4][4];
        float x[32], scores[32];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) {
          const uint32_t at = k / 4 * kPanel + k % 4 * 32;
          wgmma<0, 0>(scores, k_major(tile.q + at), k_major(tile.k + at), k > 0);
        }
#pragma unroll
        for (int k = 0; k < kK / 16; ++k)
          wgmma<0, 1>(x, k_major(tile.dout + k / 4 * kPanel + k % 4 * 32),
                      mn_major(tile.e + k * 16 * kPanelRowBytes, kPanel), k > 0);
        wgmma_commit();
        part_of_product();
        wgmma_wait<0>();
        wgmma_pin(scores);
        wgmma_pin(x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k > warp) {
            a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
            continue;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = 16 * k + 8 * half + pair;
            float d[4];
            decays_at(d, k, j, true);
            float* const s = scores + (2 * k + half) * 4;
            float* const y = x + (2 * k + half) * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              y[i] *= p.scale * d[i];
              s[i] *= y[i];
            }
            row0 += s[0] + s[1];
            row1 += s[2] + s[3];
            put_columns(0, j, s[0] + s[2], s[1] + s[3]);
            a[k][2 * half] = pack2(y[0], y[1]);
            a[k][2 * half + 1] = pack2(y[2], y[3]);
          }
        }
        store_packed(tile.weighted, a, write_row, matrix);
        async_fence();
        named_barrier(1, kGroupThreads);
        wgmma_pin(dq);
        wgmma_pin(dk);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t at = k * 16 * kPanelRowBytes;
          wgmma<1>(dq, a[k], mn_major(tile.k + at, kPanel), 1);
          wgmma<1, 1>(dk, mn_major(tile.weighted + at, kPanel), mn_major(tile.q + at, kPanel), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(dq);
        wgmma_pin(dk);
      }
      // What the states give, 64 columns at a time.
      const float keep0 = p.scale * of.keep[row], keep1 = p.scale * of.keep[row + 8];
      const float rest0 = of.rest[row], rest1 = of.rest[row + 8];
      float after0 = 0.0f, after1 = 0.0f, before0 = 0.0f, before1 = 0.0f;
#pragma unroll
      for (int n = 0; n < kPanels; ++n) {
        float before[32], after[32];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) {
          const uint32_t at = k / 4 * kRows + n * kPanel + k % 4 * 16 * kPanelRowBytes;
          wgmma<0, 1>(before, k_major(tile.dout + k / 4 * kPanel + k % 4 * 32),
                      mn_major(tile.s + at, kPanel), k > 0);
          wgmma<1, 1>(after, mn_major(tile.e + k * 16 * kPanelRowBytes, kPanel),
                      mn_major(tile.g + at, kPanel), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(before);
        wgmma_pin(after);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32_t q0 = two_of(tile.q + n * kPanel, row, i),
                         q1 = two_of(tile.q + n * kPanel, row + 8, i),
                         k0 = two_of(tile.k + n * kPanel, row, i),
                         k1 = two_of(tile.k + n * kPanel, row + 8, i);
          const float *const b = before + 4 * i, *const c = after + 4 * i;
          before0 += low_of(q0) * b[0] + high_of(q0) * b[1];
          before1 += low_of(q1) * b[2] + high_of(q1) * b[3];
          after0 += low_of(k0) * c[0] + high_of(k0) * c[1];
          after1 += low_of(k1) * c[2] + high_of(k1) * c[3];
          float *const to_q = dq + 32 * n + 4 * i, *const to_k = dk + 32 * n + 4 * i;
          to_q[0] += keep0 * b[0], to_q[1] += keep0 * b[1];
          to_q[2] += keep1 * b[2], to_q[3] += keep1 * b[3];
          to_k[0] += rest0 * c[0], to_k[1] += rest0 * c[1];
          to_k[2] += rest1 * c[2], to_k[3] += rest1 * c[3];
        }
      }
      row0 = row_sum(row0 + keep0 * before0), row1 = row_sum(row1 + keep1 * before1);
      after0 = rest0 * row_sum(after0), after1 = rest1 * row_sum(after1);
      if (lane % 4 == 0) {
        sums.row[0][row] = row0, sums.row[0][row + 8] = row1;
        sums.rest[row] = after0, sums.rest[row + 8] = after1;
      }
      barrier_arrive(sums_full);
      release(empty);
    }
    named_barrier(3, 2 * kGroupThreads);  // both have read all tiles
    float* const to = reinterpret_cast<float*>(generic(tile.s)) + thread;
#pragma unroll
    for (int i = 0; i < kK / 2; ++i) to[i * kGroupThreads] = dk[i];
    named_barrier(4, 2 * kGroupThreads);
    uint32_t packed[kK / 16][4];
    pack_sums(packed, dq);
    store_packed(tile.q, packed, write_row, matrix);
    async_fence();
    named_barrier(1, kGroupThreads);
    if (thread == 0) {
      for (int i = 0; i < kPanels; ++i)
        store_panel(&p.dq, tile.q + i * kPanel, key_head * kK + i * kPanelColumns, sample, token0);
      stores_commit();
      stores_done();
    }
    return;
  }

  float dk[kK / 2];
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) dk[i] = 0.0f;
  for (int item = 0; item < p.per_key; ++item) {
    const Tiles<kK> tile(used_here(base));
    const int head = key_head * p.per_key + item;
    barrier_wait(full, item & 1);
    barrier_wait(sums_empty, (item & 1) ^ 1);
    part_of_product();
    const float keep0 = of.keep[row], keep1 = of.keep[row + 8];
    const float beta0 = decays.beta[row], beta1 = decays.beta[row + 8];
    float row0 = 0.0f, row1 = 0.0f, dbeta0 = 0.0f, dbeta1 = 0.0f;
#pragma unroll
    for (int c = 0; c < kPanels; ++c) {
      float ks[32], dr[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(ks, k_major(tile.k + at), k_major(tile.s + c * kRows + at), k > 0);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1, 0>(dr, mn_major(tile.t + k * 16 * kPanelRowBytes, kPanel),
                    k_major(tile.de + c * kPanel + k * 32), k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(ks);
      wgmma_pin(dr);
      uint32_t a[4][4], b[4][4];  // dR; -keep beta dR
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const float keep = low ? keep1 : keep0, beta = low ? beta1 : beta0;
          const float *const s = ks + 4 * i + 2 * low, *const d = dr + 4 * i + 2 * low;
          uint32_t& v = two_of(tile.v + c * kPanel, row + 8 * low, i);
          const float of_keep = -keep * (d[0] * s[0] + d[1] * s[1]);
          const float of_beta = low_of(v) * d[0] + high_of(v) * d[1] + of_keep;
          v = pack2(beta * d[0], beta * d[1]);
          if (low)
            row1 += beta * of_keep, dbeta1 += of_beta;
          else
            row0 += beta * of_keep, dbeta0 += of_beta;
          a[i / 2][i % 2 * 2 + low] = pack2(d[0], d[1]);
          b[i / 2][i % 2 * 2 + low] = pack2(-keep * beta * d[0], -keep * beta * d[1]);
        }
      }
      store_packed(tile.dr + c * kPanel, a, write_row, matrix);
      wgmma_pin(dk);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(dk, b[k], mn_major(tile.s + c * kRows + k * 16 * kPanelRowBytes, kPanel), 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(dk);
    }
    {
      async_fence();
      named_barrier(2, kGroupThreads);
      float x[32], scores[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        const uint64_t at = k_major(tile.k + k / 4 * kPanel + k % 4 * 32);
        wgmma<0, 0>(scores, at, at, k > 0);
      }
#pragma unroll
      for (int k = 0; k < kK / 16; ++k)
        wgmma<0, 1>(x, k_major(tile.dr + k / 4 * kPanel + k % 4 * 32),
                    mn_major(tile.e + k * 16 * kPanelRowBytes, kPanel), k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(scores);
      wgmma_pin(x);
      uint32_t w[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k > warp) {
          w[k][0] = w[k][1] = w[k][2] = w[k][3] = 0;
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 16 * k + 8 * half + pair;
          float d[4];
          decays_at(d, k, j, false);
          float* const s = scores + (2 * k + half) * 4;
          float* const y = x + (2 * k + half) * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            y[i] *= -d[i];
            s[i] *= y[i];
          }
          dbeta0 += s[0] + s[1];
          dbeta1 += s[2] + s[3];
          row0 += beta0 * (s[0] + s[1]);
          row1 += beta1 * (s[2] + s[3]);
          put_columns(1, j, beta0 * s[0] + beta1 * s[2], beta0 * s[1] + beta1 * s[3]);
          w[k][2 * half] = pack2(beta0 * y[0], beta0 * y[1]);
          w[k][2 * half + 1] = pack2(beta1 * y[2], beta1 * y[3]);
        }
      }
      store_packed(tile.weighted + kPanel, w, write_row, matrix);
      async_fence();
      named_barrier(2, kGroupThreads);  // and the gradients of v are there
      if (thread == 0) {
        for (int c = 0; c < kPanels; ++c)
          store_panel(&p.dv, tile.v + c * kPanel, head * kK + c * kPanelColumns, sample, token0);
        stores_commit();
      }
      wgmma_pin(dk);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t at = k * 16 * kPanelRowBytes;
        wgmma<1>(dk, w[k], mn_major(tile.k + at, kPanel), 1);
        wgmma<1, 1>(dk, mn_major(tile.weighted + kPanel + at, kPanel),
                    mn_major(tile.k + at, kPanel), 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(dk);
    }
    row0 = row_sum(row0), row1 = row_sum(row1);
    dbeta0 = row_sum(dbeta0), dbeta1 = row_sum(dbeta1);
    if (lane % 4 == 0) {
      sums.row[1][row] = row0, sums.row[1][row + 8] = row1;
      if (token0 + row < p.steps.tokens) p.dbeta[of_head(head, row)] = dbeta0;
      if (token0 + row + 8 < p.steps.tokens) p.dbeta[of_head(head, row + 8)] = dbeta1;
    }
    barrier_arrive(sums_full);
    if (thread == 0) stores_read();
    release(empty);
  }
  named_barrier(3, 2 * kGroupThreads);
  named_barrier(4, 2 * kGroupThreads);
  const float* const from = reinterpret_cast<const float*>(generic(tile.s)) + thread;
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) dk[i] += from[i * kGroupThreads];
  uint32_t packed[kK / 16][4];
  pack_sums(packed, dk);
  store_packed(tile.k, packed, write_row, matrix);
  async_fence();
  named_barrier(2, kGroupThreads);
  if (thread == 0) {
    for (int i = 0; i < kPanels; ++i)
      store_panel(&p.dk, tile.k + i * kPanel, key_head * kK + i * kPanelColumns, sample, token0);
    stores_commit();
    stores_done();
  }
}

template <int kK>
void launch_gradients(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                      cudaStream_t stream) {
  const GatedDeltaArgs& rule = args.rule;
  const int64_t chunks = chunks_of(rule), keys = rule.key_heads * kK,
                values = rule.value_heads * kK;
  const int64_t count = rule.samples * chunks * tiles.columns;
  GradientParams p{};
  p.q = map_of(rule, rule.q, keys);
  p.k = map_of(rule, rule.k, keys);
  p.v = map_of(rule, rule.v, values);
  p.dout = map_of(rule, args.dout, values);
  p.dq = map_of(rule, args.dq, keys);
  p.dk = map_of(rule, args.dk, keys);
  p.dv = map_of(rule, args.dv, values);
  p.states = tile_map(tiles.states, count, kK);
  p.gradients = tile_map(tiles.gradients, count, kK);
  p.writes = tile_map(tiles.writes, count, kChunk);
  p.write_gradients = tile_map(tiles.write_gradients, count, kChunk);
  p.inverses = tile_map(tiles.inverses, rule.samples * chunks * rule.value_heads, kChunk);
  p.steps = step_source(rule);
  p.beta = rule.beta;
  p.dg = args.dg;
  p.dbeta = args.dbeta;
  p.scale = 1.0f / std::sqrt(static_cast<float>(kK));
  p.chunks = static_cast<int>(chunks);
  p.value_heads = static_cast<int>(rule.value_heads);
  p.per_key = static_cast<int>(rule.value_heads / rule.key_heads);
  p.columns = static_cast<int>(tiles.columns);
  constexpr int kBytes = GradientShape<kK>::kSharedBytes;
  static_assert(kBytes <= 232448);
  check_cuda(cudaFuncSetAttribute(delta_gradients<kK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kBytes),
             "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(rule.key_heads),
                  static_cast<unsigned>(rule.samples));
  delta_gradients<kK><<<grid, GradientShape<kK>::kThreads, kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "the gradients of a gated delta rule");
}

}  // namespace

void compute_gradients(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                       cudaStream_t stream) {
  if (args.rule.key_size == 64)
    launch_gradients<64>(args, tiles, stream);
  else
    launch_gradients<128>(args, tiles, stream);
}

}  // namespace megatron::delta

namespace megatron {

void gated_delta_backward_cuda(const GatedDeltaBackwardArgs& args, void* stream) {
  const auto of = static_cast<cudaStream_t>(stream);
  GatedDeltaBackwardArgs own = args;
  own.rule.workspace = args.workspace;
  const delta::DeltaTiles tiles(
      args.rule, static_cast<char*>(args.workspace) + delta::tiles_after_writes(args.rule));
  delta::compute_writes(own.rule, tiles.inverses, of);
  delta::compute_walks(own, tiles, of);
  delta::compute_gradients(own, tiles, of);
}

}  // namespace megatron
