// Note [Walks of the backward of the gated delta rule]
// A block walks the chunks of 64 columns of v of one head of one sample: half of the blocks from
// the first chunk for the states (as gated_delta.cu), half from the last for the gradients G of the
// states after the chunks. These need nothing of the states. With X = ((Q K^T) * D) / sqrt(K),
//
//   dE = X^T dO + rest * (K G)
//   G <- decay G + (keep * Q)^T dO / sqrt(K) - W^T dE
//
// Warpgroups: producer (copies; decays), state (S^T or G^T in registers), and for the gradients a
// third that computes X^T dO.
#include <cmath>

#include "megatron/kernels/detail/delta_tiles.cuh"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron::delta {
namespace {

using namespace sm90;

struct WalkParams {
  CUtensorMap q, k, w, u, dout;
  CUtensorMap states, gradients, writes, write_gradients;
  ssd::StepSource steps;
  const float *initial_state, *dfinal_state;
  float* dinitial_state;
  float scale;
  int chunks, per_key, parts, columns;
};

template <int kK>
struct WalkShape {
  static constexpr int kPanels = kK / kPanelColumns;
  static constexpr int kStages = 3, kLocals = 2;
  static constexpr int kStageBytes = kPanel * (1 + 3 * kPanels);  // U or dO; k, W, q
  static constexpr int kStateBytes = kPanel * kPanels;
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStateBytes +
                                      (1 + kLocals) * kPanel +
                                      kStages * static_cast<int>(sizeof(DeltaDecays)) +
                                      static_cast<int>(sizeof(ssd::StepRing)) + 128;
};

template <int kK>
__global__ void __launch_bounds__(WalkShape<kK>::kThreads, 1)
    delta_walks(const __grid_constant__ WalkParams p) {
  using Shape = WalkShape<kK>;
  constexpr int kStages = Shape::kStages, kPanels = Shape::kPanels, kLocals = Shape::kLocals;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = ssd::aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  const auto stage_v = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto stage_k = [&](int stage) { return stage_v(stage) + kPanel; };
  const auto stage_w = [&](int stage) { return stage_k(stage) + kPanels * kPanel; };
  const auto stage_q = [&](int stage) { return stage_w(stage) + kPanels * kPanel; };
  const uint32_t state_tile = base + kStages * Shape::kStageBytes;
  const uint32_t write_tile = state_tile + Shape::kStateBytes;
  const uint32_t locals = write_tile + kPanel;
  DeltaDecays* const decays =
      reinterpret_cast<DeltaDecays*>(shared + (locals - base) + kLocals * kPanel);
  ssd::StepRing& ring = *reinterpret_cast<ssd::StepRing*>(decays + kStages);
  const uint32_t barriers = shared_address(&ring + 1);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  const auto local_full = [&](int i) { return barriers + 8 * (2 * kStages + i); };
  const auto local_empty = [&](int i) { return barriers + 8 * (2 * kStages + kLocals + i); };

  const bool backward = blockIdx.z == 1;
  const int column = blockIdx.x, sample = blockIdx.y;  // column: of 64 of v
  const int head = column / p.parts, key_head = head / p.per_key;
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const auto chunk_at = [&](int i) { return backward ? p.chunks - 1 - i : i; };

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1 + 32);
      barrier_init(empty(i), backward ? 8 : 4);
    }
    for (int i = 0; i < kLocals; ++i) {
      barrier_init(local_full(i), kGroupThreads);
      barrier_init(local_empty(i), 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const int matrix = lane / 8, line = lane % 8;
  const int write_row = 16 * warp + (matrix % 2) * 8 + line;

  if (warpgroup == 0) {
    give_registers<40>();
    if (warp == 0) {
      if (lane == 0) {
        int stage = 0, parity = 1;
        for (int i = 0; i < p.chunks; ++i) {
          const int token = chunk_at(i) * kChunk;
          barrier_wait(empty(stage), parity);
          barrier_expect(full(stage),
                         backward ? Shape::kStageBytes : Shape::kStageBytes - kPanels * kPanel);
          load_panel(stage_v(stage), backward ? &p.dout : &p.u, full(stage), column * kPanelColumns,
                     sample, token);
          for (int panel = 0; panel < kPanels; ++panel) {
            const int at = panel * kPanelColumns, to = panel * kPanel;
            load_panel(stage_w(stage) + to, &p.w, full(stage), head * kK + at, sample, token);
            load_panel(stage_k(stage) + to, &p.k, full(stage), key_head * kK + at, sample, token);
            if (backward)
              load_panel(stage_q(stage) + to, &p.q, full(stage), key_head * kK + at, sample, token);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else if (warp == 1) {
      ssd::compute_decays<kStages>(ssd::HeadSteps(p.steps, head, sample), ring, decays, full(0),
                                   empty(0), p.chunks, lane, chunk_at);
    }
  } else if (warpgroup == 1) {
    take_registers<232>();
    float state[kK / 2];
    const int row = 16 * warp + lane / 4, first = 2 * (lane % 4);
    const int64_t values = 64 * p.parts;
    const int64_t at =
        ((static_cast<int64_t>(sample) * (gridDim.x / p.parts) + head) * kK + first) * values +
        column % p.parts * 64 + row;
    read_transposed(state, backward ? p.dfinal_state : p.initial_state, at, values);
    const int read_row = (matrix / 2) * 8 + line, read_piece = 2 * warp + matrix % 2;
    int stage = 0, parity = 0;
    for (int i = 0; i < p.chunks; ++i) {
      const int to = ((sample * p.chunks + chunk_at(i)) * p.columns + column) * 64;
      uint32_t s[kK / 16][4];  // the state, an operand
      pack_sums(s, state);
      barrier_wait(full(stage), parity);
      const DeltaDecays& weights = decays[stage];
      float e[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k)
        wgmma<0>(
            e, s[k],
            k_major((backward ? stage_k(stage) : stage_w(stage)) + k / 4 * kPanel + k % 4 * 32),
            k > 0);
      wgmma_commit();
      // Meanwhile the state goes to memory, when the tiles before have left.
      if (thread == 0) stores_read();
      named_barrier(1, kGroupThreads);
      store_packed(state_tile, s, write_row, matrix);
      const float decay = weights.decay;
#pragma unroll
      for (float& v : state) v *= decay;
      uint32_t u[4][4], a[4][4];
      const int local = i % kLocals;
      if (backward) barrier_wait(local_full(local), i / kLocals & 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        load_transposed(u[k], (backward ? locals + local * kPanel : stage_v(stage)) +
                                  panel_piece(16 * k + read_row, read_piece));
      wgmma_wait<0>();
      wgmma_pin(e);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = 16 * k + 8 * (j / 2) + first;
          const float2 rest = *reinterpret_cast<const float2*>(weights.rest + token);
          const float e0 = e[8 * k + 2 * j], e1 = e[8 * k + 2 * j + 1];
          float low = low_of(u[k][j]), high = high_of(u[k][j]);
          if (backward) {
            low += rest.x * e0;
            high += rest.y * e1;
            a[k][j] = pack2(-low, -high);
          } else {
            low -= e0;
            high -= e1;
            a[k][j] = pack2(rest.x * low, rest.y * high);
          }
          u[k][j] = pack2(low, high);
        }
      }
      wgmma_pin(state);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(state, a[k],
                 mn_major((backward ? stage_w(stage) : stage_k(stage)) + k * 16 * kPanelRowBytes,
                          kPanel),
                 1);
      wgmma_commit();
      uint32_t weighted[4][4];
      if (backward) {
        release(local_empty(local));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_transposed(weighted[k], stage_v(stage) + panel_piece(16 * k + read_row, read_piece));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int token = 16 * k + 8 * (j / 2) + first;
            const float2 keep = *reinterpret_cast<const float2*>(weights.keep + token);
            weighted[k][j] = pack2(low_of(weighted[k][j]) * keep.x * p.scale,
                                   high_of(weighted[k][j]) * keep.y * p.scale);
          }
        }
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<1>(state, weighted[k], mn_major(stage_q(stage) + k * 16 * kPanelRowBytes, kPanel),
                   1);
        wgmma_commit();
      }
      store_packed(write_tile, u, write_row, matrix);
      async_fence();
      named_barrier(2, kGroupThreads);
      if (thread == 0) {
        for (int panel = 0; panel < kPanels; ++panel)
          store_panel(backward ? &p.gradients : &p.states, state_tile + panel * kPanel,
                      panel * kPanelColumns, 0, to);
        store_panel(backward ? &p.write_gradients : &p.writes, write_tile, 0, 0, to);
        stores_commit();
      }
      wgmma_wait<0>();
      wgmma_pin(state);
      release(empty(stage));
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (backward && p.dinitial_state) write_transposed(state, p.dinitial_state, at, values);
    if (thread == 0) stores_done();
  } else if (backward) {
    take_registers<200>();
    const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
    int stage = 0, parity = 0;
    for (int i = 0; i < p.chunks; ++i) {
      const int local = i % kLocals;
      barrier_wait(full(stage), parity);
      const DeltaDecays& weights = decays[stage];
      // Rows j and columns i of X^T.
      float scores[32], f[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(scores, k_major(stage_k(stage) + at), k_major(stage_q(stage) + at), k > 0);
      }
      wgmma_commit();
      const float sum0 = weights.sum[row], sum1 = weights.sum[row + 8];
      wgmma_wait<0>();
      wgmma_pin(scores);
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < warp) {
          a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = 16 * k + 8 * half + pair;
          const float2 of = *reinterpret_cast<const float2*>(weights.sum + t);
          const int2 start = *reinterpret_cast<const int2*>(weights.start + t);
          float* const s = scores + (2 * k + half) * 4;
          s[0] *= p.scale * exp2_fast(fminf(of.x - sum0, 0.0f));
          s[1] *= p.scale * exp2_fast(fminf(of.y - sum0, 0.0f));
          s[2] *= p.scale * exp2_fast(fminf(of.x - sum1, 0.0f));
          s[3] *= p.scale * exp2_fast(fminf(of.y - sum1, 0.0f));
          if (t < row || row < start.x) s[0] = 0.0f;
          if (t + 1 < row || row < start.y) s[1] = 0.0f;
          if (t < row + 8 || row + 8 < start.x) s[2] = 0.0f;
          if (t + 1 < row + 8 || row + 8 < start.y) s[3] = 0.0f;
          a[k][2 * half] = pack2(s[0], s[1]);
          a[k][2 * half + 1] = pack2(s[2], s[3]);
        }
      }
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(f, a[k], mn_major(stage_v(stage) + k * 16 * kPanelRowBytes, kPanel), k > 0);
      wgmma_commit();
      barrier_wait(local_empty(local), (i / kLocals & 1) ^ 1);
      wgmma_wait<0>();
      wgmma_pin(f);
      release(empty(stage));
      uint32_t packed[4][4];
      pack_sums(packed, f);
      store_packed(locals + local * kPanel, packed, write_row, matrix);
      barrier_arrive(local_full(local));
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

template <int kK>
void launch_walks(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                  cudaStream_t stream) {
  const GatedDeltaArgs& rule = args.rule;
  const WorkRows work = work_rows(rule);
  const int64_t chunks = chunks_of(rule), value_columns = rule.value_heads * rule.value_size;
  const int64_t count = rule.samples * chunks * tiles.columns;
  WalkParams p{};
  p.q = map_of(rule, rule.q, rule.key_heads * kK);
  p.k = map_of(rule, rule.k, rule.key_heads * kK);
  p.w = map_of(rule, work.w, rule.value_heads * kK);
  p.u = map_of(rule, work.u, value_columns);
  p.dout = map_of(rule, args.dout, value_columns);
  p.states = tile_map(tiles.states, count, kK);
  p.gradients = tile_map(tiles.gradients, count, kK);
  p.writes = tile_map(tiles.writes, count, kChunk);
  p.write_gradients = tile_map(tiles.write_gradients, count, kChunk);
  p.steps = step_source(rule);
  p.initial_state = rule.initial_state;
  p.dfinal_state = args.dfinal_state;
  p.dinitial_state = args.dinitial_state;
  p.scale = 1.0f / std::sqrt(static_cast<float>(kK));
  p.chunks = static_cast<int>(chunks);
  p.per_key = static_cast<int>(rule.value_heads / rule.key_heads);
  p.parts = static_cast<int>(rule.value_size / 64);
  p.columns = static_cast<int>(tiles.columns);
  constexpr int kBytes = WalkShape<kK>::kSharedBytes;
  static_assert(kBytes <= 232448);
  check_cuda(
      cudaFuncSetAttribute(delta_walks<kK>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(tiles.columns), static_cast<unsigned>(rule.samples), 2);
  delta_walks<kK><<<grid, WalkShape<kK>::kThreads, kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "the walks of a gated delta rule's backward");
}

}  // namespace

void compute_walks(const GatedDeltaBackwardArgs& args, const DeltaTiles& tiles,
                   cudaStream_t stream) {
  if (args.rule.key_size == 64)
    launch_walks<64>(args, tiles, stream);
  else
    launch_walks<128>(args, tiles, stream);
}

}  // namespace megatron::delta
