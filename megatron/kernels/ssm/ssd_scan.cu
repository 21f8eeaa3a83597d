// Note [Scan of Mamba-2 on Hopper]
// A block walks the chunks of 64 columns of x (a head of 64, or half of one of 128) of one sample.
// Its warpgroups:
//   producer  one thread copies x, B, C of the next chunks into a ring of stages; one warp computes
//             the decays of chunks (running sums of steps, borders of documents)
//   state     keeps S in fp32 in registers: S = decay S + (weighted x)^T B; before each chunk it
//             writes S as bf16 to shared memory
//   outputs   take turns with the chunks: y = ((C B^T) o L) x + (decay C) S^T + d x
// Neighbouring blocks of a cluster have the same group: each copies its share of B and C into all.
#include "megatron/kernels/detail/sm90.cuh"
#include "megatron/kernels/detail/ssd_chunk.cuh"
#include "megatron/kernels/ssm/ssd_scan.h"

namespace megatron {
namespace {

using namespace sm90;
using namespace ssd;

struct ScanParams {
  CUtensorMap x, y, b, c;
  StepSource steps;
  const float* d;
  const float* initial_state;
  float* final_state;
  int chunks, heads, heads_per_group, parts;  // parts: head_size / 64
};

template <int kN, int kOutputs_, int kStages_, int kCluster_>
struct ScanShape {
  static constexpr int kState = kN, kOutputs = kOutputs_, kStages = kStages_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStateGroups = kN <= 128 ? 1 : kN / 128;
  static constexpr int kStateColumns = kN / kStateGroups;
  static constexpr int kPanels = kN / kPanelColumns;  // of B, C, S
  static constexpr int kThreads = kGroupThreads * (1 + kStateGroups + kOutputs);
  static constexpr int kStateBuffers = kN <= 128 ? 2 : 1;
  static constexpr int kStageBytes = kPanel * (1 + 2 * kPanels);
  static constexpr int kStateBytes = kPanel * kPanels;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kStateBuffers * kStateBytes + kOutputs * kPanel +
      kStages * static_cast<int>(sizeof(ChunkDecays)) + static_cast<int>(sizeof(StepRing)) + 128;
  // Registers of a thread: at the launch, and after the block's are divided anew.
  static constexpr int kGroups = 1 + kStateGroups + kOutputs;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kFree =
      (kLaunchRegisters * kGroups - kProducerRegisters) / (kGroups - 1) / 8 * 8;
  static constexpr int kConsumerRegisters = kFree > 232 ? 232 : kFree;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    scan_forward(const __grid_constant__ ScanParams p) {
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  constexpr int kStages = Shape::kStages, kPanels = Shape::kPanels, kCluster = Shape::kCluster;
  const auto stage_x = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto stage_b = [&](int stage) { return stage_x(stage) + kPanel; };
  const auto stage_c = [&](int stage) { return stage_b(stage) + kPanels * kPanel; };
  const uint32_t states = base + kStages * Shape::kStageBytes;
  const auto state_at = [&](int buffer) { return states + buffer * Shape::kStateBytes; };
  const uint32_t outputs = states + Shape::kStateBuffers * Shape::kStateBytes;
  ChunkDecays* const decays = reinterpret_cast<ChunkDecays*>(
      shared + kStages * Shape::kStageBytes + Shape::kStateBuffers * Shape::kStateBytes +
      Shape::kOutputs * kPanel);
  StepRing& ring = *reinterpret_cast<StepRing*>(decays + kStages);
  const uint32_t barriers = shared_address(&ring + 1);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  const auto state_full = [&](int buffer) { return barriers + 8 * (2 * kStages + buffer); };
  const auto state_empty = [&](int buffer) {
    return barriers + 8 * (2 * kStages + Shape::kStateBuffers + buffer);
  };

  const int column = blockIdx.x;  // of 64 of x
  const int head = column / p.parts, sample = blockIdx.y;
  const int group = head / p.heads_per_group;
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1 + 32);
      barrier_init(empty(i), 4 * (1 + Shape::kStateGroups) * kCluster);
    }
    for (int i = 0; i < Shape::kStateBuffers; ++i) {
      barrier_init(state_full(i), kGroupThreads * Shape::kStateGroups);
      barrier_init(state_empty(i), 4);
    }
    barrier_init_fence();
  }
  if constexpr (kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  // A warp has read a stage: every block that copies into it hears so.
  const auto release = [&](int stage) {
    __syncwarp();
    if constexpr (kCluster > 1) {
      if (lane < kCluster) barrier_arrive_at(empty(stage), lane);
    } else {
      if (lane == 0) barrier_arrive(empty(stage));
    }
  };

  if (warpgroup == 0) {
    give_registers<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        constexpr int kRows = kChunk / kCluster;
        const int rank = kCluster > 1 ? cluster_rank() : 0;
        int stage = 0, parity = 1;
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
          barrier_wait(empty(stage), parity);
          barrier_expect(full(stage), Shape::kStageBytes);
          const int token = chunk * kChunk;
          load_panel(stage_x(stage), &p.x, full(stage), column * kPanelColumns, sample, token);
          const uint32_t share = rank * kRows * kPanelRowBytes;
          for (int i = 0; i < kPanels; ++i) {
            const int at = group * Shape::kState + i * kPanelColumns;
            const uint32_t to_b = stage_b(stage) + i * kPanel + share,
                           to_c = stage_c(stage) + i * kPanel + share;
            if constexpr (kCluster > 1) {
              constexpr uint16_t kAll = (1 << kCluster) - 1;
              load_panel_to(to_b, &p.b, full(stage), at, sample, token + rank * kRows, kAll);
              load_panel_to(to_c, &p.c, full(stage), at, sample, token + rank * kRows, kAll);
            } else {
              load_panel(to_b, &p.b, full(stage), at, sample, token);
              load_panel(to_c, &p.c, full(stage), at, sample, token);
            }
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else if (warp == 1) {
      compute_decays<kStages>(HeadSteps(p.steps, head, sample), ring, decays, full(0), empty(0),
                              p.chunks, lane, [](int i) { return i; });
    }
  } else if (warpgroup <= Shape::kStateGroups) {
    take_registers<Shape::kConsumerRegisters>();
    constexpr int kColumns = Shape::kStateColumns;
    const int first_column = (warpgroup - 1) * kColumns;
    float state[kColumns / 2];
    const int row = 16 * warp + lane / 4;
    const int64_t at =
        ((static_cast<int64_t>(sample) * p.heads * p.parts + column) * 64 + row) * Shape::kState +
        first_column + 2 * (lane % 4);
    read_state<kColumns, Shape::kState>(state, p.initial_state, at);
    const int matrix = lane / 8, line = lane % 8;
    // Rows of the matrices that this lane names: of S when it is written, of x when it is read.
    const int write_row = 16 * warp + (matrix % 2) * 8 + line;
    const int read_row = (matrix / 2) * 8 + line, read_piece = 2 * warp + matrix % 2;
    const auto give_state = [&](int buffer) {
      write_state_panels<kColumns>(state_at(buffer) + first_column / kPanelColumns * kPanel, state,
                                   write_row, matrix);
      async_fence();
      barrier_arrive(state_full(buffer));
    };
    give_state(0);
    int stage = 0, parity = 0;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      barrier_wait(full(stage), parity);
      const ChunkDecays& weights = decays[stage];
      uint32_t a[kChunk / 16][4];
      load_weighted<kChunk / 16>(a, stage_x(stage), read_row, read_piece, weights.weight, lane);
      const float decay = weights.decay;
#pragma unroll
      for (float& s : state) s *= decay;
      wgmma_pin(state);
      wgmma_begin();
      const uint32_t b = stage_b(stage) + first_column / kPanelColumns * kPanel;
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
        wgmma<1>(state, a[k], mn_major(b + k * 16 * kPanelRowBytes, kPanel), 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(state);
      release(stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
      if (chunk + 1 < p.chunks) {
        const int write = chunk + 1, buffer = write % Shape::kStateBuffers;
        barrier_wait(state_empty(buffer), (write / Shape::kStateBuffers & 1) ^ 1);
        give_state(buffer);
      }
    }
    if (p.final_state) write_state<kColumns, Shape::kState>(state, p.final_state, at);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    const int turn = warpgroup - 1 - Shape::kStateGroups;
    const float d = p.d ? p.d[head] : 0.0f;
    const uint32_t out = outputs + turn * kPanel;
    const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
    const int matrix = lane / 8, line = lane % 8;
    const int write_row = 16 * warp + (matrix % 2) * 8 + line;
    int stage = turn % kStages, round = turn / kStages;
    for (int chunk = turn; chunk < p.chunks; chunk += Shape::kOutputs) {
      const int buffer = chunk % Shape::kStateBuffers;
      barrier_wait(full(stage), round & 1);
      float scores[32], y[32];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < Shape::kState / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(scores, k_major(stage_c(stage) + at), k_major(stage_b(stage) + at), k > 0);
      }
      wgmma_commit();
      barrier_wait(state_full(buffer), chunk / Shape::kStateBuffers & 1);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < Shape::kState / 16; ++k) {
        const uint32_t at = k / 4 * kPanel + k % 4 * 32;
        wgmma<0, 0>(y, k_major(stage_c(stage) + at), k_major(state_at(buffer) + at), k > 0);
      }
      wgmma_commit();
      const ChunkDecays& weights = decays[stage];
      const float sum0 = weights.sum_step[row].x, sum1 = weights.sum_step[row + 8].x;
      const float keep0 = weights.keep[row], keep1 = weights.keep[row + 8];
      const int start0 = weights.start[row], start1 = weights.start[row + 8];
      const bool has_border = weights.has_border != 0;
      wgmma_wait<1>();
      wgmma_pin(scores);
      uint32_t a[kChunk / 16][4];
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        if (k > warp) {
          a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 16 * k + 8 * half + pair;
          // The sums and steps of tokens j, j + 1.
          const float4 of = *reinterpret_cast<const float4*>(weights.sum_step + j);
          float* const s = scores + (2 * k + half) * 4;
          s[0] *= exp2_fast(fminf(sum0 - of.x, 0.0f)) * of.y;
          s[1] *= exp2_fast(fminf(sum0 - of.z, 0.0f)) * of.w;
          s[2] *= exp2_fast(fminf(sum1 - of.x, 0.0f)) * of.y;
          s[3] *= exp2_fast(fminf(sum1 - of.z, 0.0f)) * of.w;
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
      wgmma_pin(y);
      __syncwarp();
      if (lane == 0) barrier_arrive(state_empty(buffer));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float2 x0{0.0f, 0.0f}, x1{0.0f, 0.0f};
        if (d != 0.0f) {
          const unsigned char* const from = shared + stage * Shape::kStageBytes + 2 * pair;
          const uint32_t two0 = *reinterpret_cast<const uint32_t*>(from + panel_piece(row, i)),
                         two1 = *reinterpret_cast<const uint32_t*>(from + panel_piece(row + 8, i));
          x0 = {low_of(two0), high_of(two0)};
          x1 = {low_of(two1), high_of(two1)};
        }
        y[4 * i] = y[4 * i] * keep0 + d * x0.x;
        y[4 * i + 1] = y[4 * i + 1] * keep0 + d * x0.y;
        y[4 * i + 2] = y[4 * i + 2] * keep1 + d * x1.x;
        y[4 * i + 3] = y[4 * i + 3] * keep1 + d * x1.y;
      }
      wgmma_pin(y);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
        wgmma<1>(y, a[k], mn_major(stage_x(stage) + k * 16 * kPanelRowBytes, kPanel), 1);
      wgmma_commit();
      // The store of the chunk before has left its place.
      if (thread == 0) stores_read();
      named_barrier(1 + turn, kGroupThreads);
      wgmma_wait<0>();
      wgmma_pin(y);
      release(stage);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const v = y + 8 * i;
        store_matrices(out + panel_piece(write_row, 2 * i + matrix / 2), pack2(v[0], v[1]),
                       pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
      }
      async_fence();
      named_barrier(1 + turn, kGroupThreads);
      if (thread == 0) {
        store_panel(&p.y, out, column * kPanelColumns, sample, chunk * kChunk);
        stores_commit();
      }
      stage += Shape::kOutputs;
      if (stage >= kStages) stage -= kStages, ++round;
    }
    if (thread == 0) stores_done();
  }
  if constexpr (kCluster > 1) cluster_sync();
}

template <class Shape>
void run_forward(const SsdScanArgs& args, cudaStream_t stream) {
  ScanParams p{};
  const int64_t x_columns = args.heads * args.head_size, b_columns = args.groups * args.state_size;
  const auto map = [&](const ScanRows& rows, int64_t columns, int box_rows) {
    return panel_map(rows.data, columns, args.samples, args.tokens, rows.sample, rows.token,
                     box_rows);
  };
  p.x = map(args.x, x_columns, kChunk);
  p.y = map(args.y, x_columns, kChunk);
  p.b = map(args.b, b_columns, kChunk / Shape::kCluster);
  p.c = map(args.c, b_columns, kChunk / Shape::kCluster);
  p.steps = step_source(args);
  p.d = args.d;
  p.initial_state = args.initial_state, p.final_state = args.final_state;
  p.chunks = static_cast<int>((args.tokens + kChunk - 1) / kChunk);
  p.heads = static_cast<int>(args.heads);
  p.heads_per_group = static_cast<int>(args.heads / args.groups);
  p.parts = static_cast<int>(args.head_size / 64);
  auto* const kernel = scan_forward<Shape>;
  static_assert(Shape::kSharedBytes <= 232448);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Shape::kSharedBytes),
             "cudaFuncSetAttribute");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(args.heads * p.parts), static_cast<unsigned>(args.samples));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Shape::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p), "the scan of Mamba-2");
}

}  // namespace

bool has_ssd_scan() { return is_hopper(); }

void ssd_scan_forward_cuda(const SsdScanArgs& args, void* stream) {
  const auto with_state = [&](auto clusters) {
    constexpr int kCluster = decltype(clusters)::value;
    switch (args.state_size) {
      case 64:
        return run_forward<ScanShape<64, 2, 4, kCluster>>(args, as_stream(stream));
      case 128:
        return run_forward<ScanShape<128, 2, 4, kCluster>>(args, as_stream(stream));
      default:
        return run_forward<ScanShape<256, 2, 2, kCluster>>(args, as_stream(stream));
    }
  };
  if (args.heads / args.groups * (args.head_size / 64) % 2 == 0)
    with_state(std::integral_constant<int, 2>());
  else
    with_state(std::integral_constant<int, 1>());
}

}  // namespace megatron
