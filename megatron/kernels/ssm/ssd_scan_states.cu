// The first kernel of the scan's backward (Note [Backward of the scan of Mamba-2]).
#include "megatron/kernels/detail/ssd_states.cuh"

namespace megatron::ssd {
namespace {

using namespace sm90;

struct StatesParams {
  ScanStates maps;
  StepSource steps;
  const float *initial_state, *dfinal_state;
  float* dinitial_state;
  int chunks, spans, heads_per_group, parts, columns;  // columns: H parts
};

template <int kN>
struct StatesShape {
  static constexpr int kPanels = kN / kPanelColumns;
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = kPanel * (1 + kPanels);
  static constexpr int kThreads = 2 * kGroupThreads;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kPanels * kPanel +
                                      kStages * static_cast<int>(sizeof(ChunkDecays)) +
                                      static_cast<int>(sizeof(StepRing)) + 64;
};

// blockIdx.z 0: states, 1: gradients, from the last chunk to the first.
template <int kN>
__global__ void __launch_bounds__(StatesShape<kN>::kThreads, 2)
    scan_states(const __grid_constant__ StatesParams p) {
  using Shape = StatesShape<kN>;
  constexpr int kStages = Shape::kStages, kPanels = Shape::kPanels;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = aligned_shared(raw);
  const uint32_t base = shared_address(shared);
  const auto stage_x = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto stage_b = [&](int stage) { return stage_x(stage) + kPanel; };
  const uint32_t out = base + kStages * Shape::kStageBytes;
  ChunkDecays* const decays =
      reinterpret_cast<ChunkDecays*>(shared + kStages * Shape::kStageBytes + kPanels * kPanel);
  StepRing& ring = *reinterpret_cast<StepRing*>(decays + kStages);
  const uint32_t barriers = shared_address(&ring + 1);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };

  const bool backward = blockIdx.z == 1;
  const int column = blockIdx.x, head = column / p.parts, sample = blockIdx.y;
  const int group = head / p.heads_per_group;
  const int warpgroup = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const auto chunk_at = [&](int i) { return backward ? p.chunks - 1 - i : i; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1 + 32);
      barrier_init(empty(i), 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    if (warp == 0 && lane == 0) {
      int stage = 0, parity = 1;
      for (int i = 0; i < p.chunks; ++i) {
        barrier_wait(empty(stage), parity);
        barrier_expect(full(stage), Shape::kStageBytes);
        const int token = chunk_at(i) * kChunk;
        load_panel(stage_x(stage), backward ? &p.maps.dy : &p.maps.x, full(stage),
                   column * kPanelColumns, sample, token);
        for (int panel = 0; panel < kPanels; ++panel)
          load_panel(stage_b(stage) + panel * kPanel, backward ? &p.maps.c : &p.maps.b, full(stage),
                     group * kN + panel * kPanelColumns, sample, token);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    } else if (warp == 1) {
      compute_decays<kStages>(HeadSteps(p.steps, head, sample), ring, decays, full(0), empty(0),
                              p.chunks, lane, chunk_at);
    }
    return;
  }
  const int row = 16 * warp + lane / 4;
  const int64_t at =
      ((static_cast<int64_t>(sample) * p.columns + column) * 64 + row) * kN + 2 * (lane % 4);
  const int matrix = lane / 8, line = lane % 8;
  const int write_row = 16 * warp + (matrix % 2) * 8 + line;
  const int read_row = (matrix / 2) * 8 + line, read_piece = 2 * warp + matrix % 2;
  float state[kN / 2];
  read_state<kN>(state, backward ? p.dfinal_state : p.initial_state, at);
  int stage = 0, parity = 0;
  for (int i = 0; i < p.chunks; ++i) {
    const int chunk = chunk_at(i);
    // At the start of a span for states, at its end for gradients.
    if (backward ? chunk % 2 == 1 || chunk == p.chunks - 1 : chunk % 2 == 0) {
      if (thread == 0) stores_read();
      named_barrier(1, kGroupThreads);
      write_state_panels<kN>(out, state, write_row, matrix);
      async_fence();
      named_barrier(1, kGroupThreads);
      if (thread == 0) {
        const int to = ((sample * p.spans + chunk / 2) * p.columns + column) * 64;
        for (int panel = 0; panel < kPanels; ++panel)
          store_panel(backward ? &p.maps.gradients : &p.maps.states, out + panel * kPanel,
                      panel * kPanelColumns, 0, to);
        stores_commit();
      }
    }
    barrier_wait(full(stage), parity);
    const ChunkDecays& weights = decays[stage];
    uint32_t a[kChunk / 16][4];
    load_weighted<kChunk / 16>(a, stage_x(stage), read_row, read_piece,
                               backward ? weights.keep : weights.weight, lane);
    const float decay = weights.decay;
#pragma unroll
    for (float& s : state) s *= decay;
    wgmma_pin(state);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      wgmma<1>(state, a[k], mn_major(stage_b(stage) + k * 16 * kPanelRowBytes, kPanel), 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(state);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty(stage));
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (backward && p.dinitial_state) write_state<kN>(state, p.dinitial_state, at);
  if (thread == 0) stores_done();
}

template <int kN>
void launch_states(const SsdScanBackwardArgs& args, const ScanStates& maps, cudaStream_t stream) {
  const SsdScanArgs& scan = args.scan;
  const int64_t spans = spans_of(scan), columns = scan.heads * (scan.head_size / 64);
  StatesParams first{};
  first.maps = maps;
  first.steps = step_source(scan);
  first.initial_state = scan.initial_state;
  first.dfinal_state = args.dfinal_state;
  first.dinitial_state = args.dinitial_state;
  first.chunks = static_cast<int>((scan.tokens + kChunk - 1) / kChunk);
  first.spans = static_cast<int>(spans);
  first.heads_per_group = static_cast<int>(scan.heads / scan.groups);
  first.parts = static_cast<int>(scan.head_size / 64);
  first.columns = static_cast<int>(columns);
  constexpr int kFirstBytes = StatesShape<kN>::kSharedBytes;
  check_cuda(cudaFuncSetAttribute(scan_states<kN>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kFirstBytes),
             "cudaFuncSetAttribute");
  scan_states<kN><<<dim3(static_cast<unsigned>(columns), static_cast<unsigned>(scan.samples), 2),
                    StatesShape<kN>::kThreads, kFirstBytes, stream>>>(first);
  check_cuda(cudaGetLastError(), "the states of the scan of Mamba-2");
}

}  // namespace

void compute_states(const SsdScanBackwardArgs& args, const ScanStates& maps, cudaStream_t stream) {
  if (args.scan.state_size == 64)
    launch_states<64>(args, maps, stream);
  else
    launch_states<128>(args, maps, stream);
}

}  // namespace megatron::ssd
