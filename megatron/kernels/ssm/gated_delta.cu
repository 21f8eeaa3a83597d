// Note [Gated delta rule on Hopper]
// One kernel computes W and U of all chunks (gated_delta_writes.cu); in the other a block walks the
// chunks of 64 columns of the values of one head (one of 64, or half of one of 128) of one sample.
// Its warpgroups:
//   producer  one thread copies q, k, W, U of the next chunks into a ring of stages; one warp
//             computes the decays of chunks
//   state     keeps S^T, whose rows are columns of v, in fp32 in registers: E^T = U^T - S^T W^T,
//             then S^T = decay S^T + (rest * E^T) K. Sums of one product are the operand of the
//             next without leaving registers. S^T before the chunk and E^T go to shared memory as
//             bf16
//   outputs   take turns with the chunks: o = (keep (Q S) + ((Q K^T) * D) E) / sqrt(K)
#include <cmath>

#include "megatron/kernels/detail/delta_chunk.cuh"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron {
namespace {

using namespace sm90;
using namespace delta;
using ssd::HeadSteps;
using ssd::StepRing;

struct RuleParams {
  CUtensorMap q, k, w, u, o;
  ssd::StepSource steps;
  const float* initial_state;
  float* final_state;
  float scale;
  int chunks, per_key, parts;  // parts: V / 64
};

template <int kK>
struct RuleShape {
  static constexpr int kPanels = kK / kPanelColumns;
  static constexpr int kStages = 3, kOutputs = 2, kWriteBuffers = 2;
  static constexpr int kStageBytes = kPanel * (1 + 3 * kPanels);  // U; q, k, W
  static constexpr int kStateBytes = kPanel * kPanels;
  static constexpr int kThreads = kGroupThreads * (2 + kOutputs);
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kStateBytes + (kWriteBuffers + kOutputs) * kPanel +
      kStages * static_cast<int>(sizeof(DeltaDecays)) + static_cast<int>(sizeof(StepRing)) + 128;
};

template <int kK>
__global__ void __launch_bounds__(RuleShape<kK>::kThreads, 1)
    delta_forward(const __grid_constant__ RuleParams p) {
  using Shape = RuleShape<kK>;
  constexpr int kStages = Shape::kStages, kPanels = Shape::kPanels;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = ssd::aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  const auto stage_u = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto stage_q = [&](int stage) { return stage_u(stage) + kPanel; };
  const auto stage_k = [&](int stage) { return stage_q(stage) + kPanels * kPanel; };
  const auto stage_w = [&](int stage) { return stage_k(stage) + kPanels * kPanel; };
  const uint32_t state_tile = base + kStages * Shape::kStageBytes;
  const uint32_t writes = state_tile + Shape::kStateBytes;
  const uint32_t outputs = writes + Shape::kWriteBuffers * kPanel;
  DeltaDecays* const decays =
      reinterpret_cast<DeltaDecays*>(shared + (outputs - base) + Shape::kOutputs * kPanel);
  StepRing& ring = *reinterpret_cast<StepRing*>(decays + kStages);
  const uint32_t barriers = shared_address(&ring + 1);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  // One of each turn of the outputs: who waits for every second phase of one barrier cannot tell
  // the phase before from the one after.
  const auto state_full = [&](int turn) { return barriers + 8 * (2 * kStages + turn); };
  const uint32_t state_empty = state_full(Shape::kOutputs);
  const auto write_full = [&](int buffer) { return state_empty + 8 + 8 * buffer; };
  const auto write_empty = [&](int buffer) { return write_full(Shape::kWriteBuffers + buffer); };

  const int column = blockIdx.x;  // of 64 of v
  const int head = column / p.parts, key_head = head / p.per_key, sample = blockIdx.y;
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1 + 32);
      barrier_init(empty(i), 8);
    }
    for (int i = 0; i < Shape::kOutputs; ++i) barrier_init(state_full(i), kGroupThreads);
    barrier_init(state_empty, 4);
    for (int i = 0; i < Shape::kWriteBuffers; ++i) {
      barrier_init(write_full(i), kGroupThreads);
      barrier_init(write_empty(i), 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  // A warp has read what the barrier guards.
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const int matrix = lane / 8, line = lane % 8;
  const int write_row = 16 * warp + (matrix % 2) * 8 + line;

  if (warpgroup == 0) {
    give_registers<32>();
    if (warp == 0) {
      if (lane == 0) {
        int stage = 0, parity = 1;
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
          barrier_wait(empty(stage), parity);
          barrier_expect(full(stage), Shape::kStageBytes);
          const int token = chunk * kChunk;
          for (int i = 0; i < kPanels; ++i)
            load_panel(stage_w(stage) + i * kPanel, &p.w, full(stage),
                       head * kK + i * kPanelColumns, sample, token);
          load_panel(stage_u(stage), &p.u, full(stage), column * kPanelColumns, sample, token);
          for (int i = 0; i < kPanels; ++i) {
            const int at = key_head * kK + i * kPanelColumns;
            load_panel(stage_k(stage) + i * kPanel, &p.k, full(stage), at, sample, token);
            load_panel(stage_q(stage) + i * kPanel, &p.q, full(stage), at, sample, token);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else if (warp == 1) {
      ssd::compute_decays<kStages>(HeadSteps(p.steps, head, sample), ring, decays, full(0),
                                   empty(0), p.chunks, lane, [](int i) { return i; });
    }
  } else if (warpgroup == 1) {
    take_registers<160>();
    float state[kK / 2];
    // Row (a column of v) and first column (of keys) of the thread; in memory states are [K, V].
    const int row = 16 * warp + lane / 4, first = 2 * (lane % 4);
    const int64_t values = 64 * p.parts;
    const int64_t at =
        ((static_cast<int64_t>(sample) * (gridDim.x / p.parts) + head) * kK + first) * values +
        column % p.parts * 64 + row;
    read_transposed(state, p.initial_state, at, values);
    const int read_row = (matrix / 2) * 8 + line, read_piece = 2 * warp + matrix % 2;
    uint32_t s[kK / 16][4];  // the state, an operand
    int stage = 0, parity = 0;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const int buffer = chunk % Shape::kWriteBuffers;
      pack_sums(s, state);
      barrier_wait(full(stage), parity);
      float e[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k)
        wgmma<0>(e, s[k], k_major(stage_w(stage) + k / 4 * kPanel + k % 4 * 32), k > 0);
      wgmma_commit();
      // Meanwhile the state goes to the outputs, and U^T comes.
      barrier_wait(state_empty, (chunk & 1) ^ 1);
      store_packed(state_tile, s, write_row, matrix);
      async_fence();
      barrier_arrive(state_full(chunk % Shape::kOutputs));
      const DeltaDecays& weights = decays[stage];
      const float decay = weights.decay;
#pragma unroll
      for (float& v : state) v *= decay;
      uint32_t u[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        load_transposed(u[k], stage_u(stage) + panel_piece(16 * k + read_row, read_piece));
      wgmma_wait<0>();
      wgmma_pin(e);
      uint32_t weighted[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 16 * k + 8 * (i / 2) + first;
          const float2 rest = *reinterpret_cast<const float2*>(weights.rest + token);
          const float low = low_of(u[k][i]) - e[8 * k + 2 * i],
                      high = high_of(u[k][i]) - e[8 * k + 2 * i + 1];
          u[k][i] = pack2(low, high);
          weighted[k][i] = pack2(low * rest.x, high * rest.y);
        }
      }
      wgmma_pin(state);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(state, weighted[k], mn_major(stage_k(stage) + k * 16 * kPanelRowBytes, kPanel), 1);
      wgmma_commit();
      barrier_wait(write_empty(buffer), (chunk / Shape::kWriteBuffers & 1) ^ 1);
      store_packed(writes + buffer * kPanel, u, write_row, matrix);
      async_fence();
      barrier_arrive(write_full(buffer));
      wgmma_wait<0>();
      wgmma_pin(state);
      release(empty(stage));
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (p.final_state) write_transposed(state, p.final_state, at, values);
  } else {
    take_registers<160>();
    const int turn = warpgroup - 2;
    const uint32_t out = outputs + turn * kPanel;
    const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
    int stage = turn % kStages, round = turn / kStages;
    for (int chunk = turn; chunk < p.chunks; chunk += Shape::kOutputs) {
      const int buffer = chunk % Shape::kWriteBuffers;
      barrier_wait(full(stage), round & 1);
      float scores[32], o[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(scores, k_major(stage_q(stage) + at), k_major(stage_k(stage) + at), k > 0);
      }
      wgmma_commit();
      barrier_wait(state_full(turn), chunk / Shape::kOutputs & 1);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(o, k_major(stage_q(stage) + at), k_major(state_tile + at), k > 0);
      }
      wgmma_commit();
      const DeltaDecays& weights = decays[stage];
      const float sum0 = weights.sum[row], sum1 = weights.sum[row + 8];
      const float keep0 = weights.keep[row], keep1 = weights.keep[row + 8];
      const int start0 = weights.start[row], start1 = weights.start[row + 8];
      const bool has_border = weights.has_border != 0;
      wgmma_wait<1>();
      wgmma_pin(scores);
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k > warp) {
          a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 16 * k + 8 * half + pair;
          const float2 of = *reinterpret_cast<const float2*>(weights.sum + j);
          float* const s = scores + (2 * k + half) * 4;
          s[0] *= exp2_fast(fminf(sum0 - of.x, 0.0f));
          s[1] *= exp2_fast(fminf(sum0 - of.y, 0.0f));
          s[2] *= exp2_fast(fminf(sum1 - of.x, 0.0f));
          s[3] *= exp2_fast(fminf(sum1 - of.y, 0.0f));
          if (k == warp) {
            if (j > row) s[0] = 0.0f;
            if (j + 1 > row) s[1] = 0.0f;
            if (j > row + 8) s[2] = 0.0f;
            if (j + 1 > row + 8) s[3] = 0.0f;
          }
          if (has_border) {
            if (j < start0) s[0] = 0.0f;
            if (j + 1 < start0) s[1] = 0.0f;
            if (j < start1) s[2] = 0.0f;
            if (j + 1 < start1) s[3] = 0.0f;
          }
          a[k][2 * half] = pack2(s[0], s[1]);
          a[k][2 * half + 1] = pack2(s[2], s[3]);
        }
      }
      wgmma_wait<0>();
      wgmma_pin(o);
      release(state_empty);
      release(empty(stage));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        o[4 * i] *= keep0;
        o[4 * i + 1] *= keep0;
        o[4 * i + 2] *= keep1;
        o[4 * i + 3] *= keep1;
      }
      barrier_wait(write_full(buffer), chunk / Shape::kWriteBuffers & 1);
      wgmma_pin(o);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<0>(o, a[k], k_major(writes + buffer * kPanel + 32 * k), 1);
      wgmma_commit();
      // The store of the chunk before has left its place.
      if (thread == 0) stores_read();
      named_barrier(1 + turn, kGroupThreads);
      wgmma_wait<0>();
      wgmma_pin(o);
      release(write_empty(buffer));
#pragma unroll
      for (float& v : o) v *= p.scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const v = o + 8 * i;
        store_matrices(out + panel_piece(write_row, 2 * i + matrix / 2), pack2(v[0], v[1]),
                       pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
      }
      async_fence();
      named_barrier(1 + turn, kGroupThreads);
      if (thread == 0) {
        store_panel(&p.o, out, column * kPanelColumns, sample, chunk * kChunk);
        stores_commit();
      }
      stage += Shape::kOutputs;
      if (stage >= kStages) stage -= kStages, ++round;
    }
    if (thread == 0) stores_done();
  }
}

template <int kK>
void launch_forward(const GatedDeltaArgs& args, cudaStream_t stream) {
  const WorkRows work = work_rows(args);
  const int64_t value_columns = args.value_heads * args.value_size;
  RuleParams p{};
  p.q = map_of(args, args.q, args.key_heads * kK);
  p.k = map_of(args, args.k, args.key_heads * kK);
  p.w = map_of(args, work.w, args.value_heads * kK);
  p.u = map_of(args, work.u, value_columns);
  p.o = map_of(args, args.o, value_columns);
  p.steps = step_source(args);
  p.initial_state = args.initial_state, p.final_state = args.final_state;
  p.scale = 1.0f / std::sqrt(static_cast<float>(kK));
  p.chunks = static_cast<int>((args.tokens + kChunk - 1) / kChunk);
  p.per_key = static_cast<int>(args.value_heads / args.key_heads);
  p.parts = static_cast<int>(args.value_size / 64);
  constexpr int kBytes = RuleShape<kK>::kSharedBytes;
  static_assert(kBytes <= 232448);
  check_cuda(
      cudaFuncSetAttribute(delta_forward<kK>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(args.value_heads * p.parts),
                  static_cast<unsigned>(args.samples));
  delta_forward<kK><<<grid, RuleShape<kK>::kThreads, kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "a gated delta rule");
}

}  // namespace

void gated_delta_forward_cuda(const GatedDeltaArgs& args, void* stream) {
  const auto of = static_cast<cudaStream_t>(stream);
  compute_writes(args, nullptr, of);
  if (args.key_size == 64)
    launch_forward<64>(args, of);
  else
    launch_forward<128>(args, of);
}

}  // namespace megatron
