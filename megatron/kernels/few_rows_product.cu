// Note [Products of few rows on a GPU]
// The product of a token reads a matrix once and does little else, so it takes as long as the
// memory takes. A multiprocessor has one block, which takes kTile rows of the matrix at a time,
// in spans of kSpan bytes of each: a stage. One warp copies stages (cp.async.bulk) into a ring in
// shared memory, kWarps multiply, each every eighth piece of the rows, and one adds up what these
// have, so that no warp waits for the last additions of a tile.
//
// Of weights at rest the ring fills before the kernel ahead, which computes `x`, has ended. A block
// takes half of a multiprocessor, so that the next product's block is there beside it, with its
// ring full, when this one ends. It must begin while all multiprocessors are alike: beside a kernel
// that takes much of some, or when some are done, others would get two of its blocks, which takes
// up to twice as long.
//
// Tensor cores multiply. The order of elements within a piece, which is that of shared memory, does
// not matter to a sum. Codes of FP8 become fp16, which holds them exactly, and rows of x, scaled by
// a power of two, too (but for elements below 2^-28 of the largest). Sums are fp32. A norm of `x`
// is computed by every block for itself, which takes less time than a kernel does.
#include <algorithm>

#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/few_rows_input.cuh"
#include "megatron/kernels/detail/mma_tiles.cuh"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 8, kMultiplying = kLanes * kWarps;
constexpr int kThreadsOfBlock = kMultiplying + 2 * kLanes, kResident = 2;
constexpr int kTile = 8;  // rows of the matrix
constexpr int kSpan = 2048;
constexpr int kPiece = 64;  // bytes of a row that a warp multiplies at a time, 16 of a thread
constexpr int kPieces = kSpan / kPiece / kWarps;  // of a warp in a stage
constexpr int kRowBytes = kSpan + kPiece;         // rows lie in other banks then
constexpr int kStageBytes = kTile * kRowBytes;
constexpr int kMostStages = 8;
constexpr int kPad = 8;  // elements between rows of x, which lie in other banks then
// Dynamic shared memory of a block that is half of a multiprocessor's, and of one that is alone.
constexpr int kHalf = 106 << 10, kAlone = 218 << 10;
constexpr int kLeastStages = 3;
// Named barriers; the last two for two tiles each.
constexpr int kMeet = 1, kMultiplied = 2, kTaken = 4;

enum class Weights { kPlain, kCodes, kCodesOfBlocks };
constexpr int bytes_of(Weights kind) { return kind == Weights::kPlain ? 2 : 1; }

// The block's stages, one after the other; of a pair of tiles (SwiGLU) the gate's come first.
template <bool Swiglu>
struct Stages {
  int row_bytes, spans, all_spans;
  int64_t columns, tiles;
  int64_t tile;
  int span = 0;

  __device__ Stages(const FewRowsProduct& a, int element)
      : row_bytes(static_cast<int>(a.inner) * element),
        spans((row_bytes + kSpan - 1) / kSpan),
        all_spans(Swiglu ? 2 * spans : spans),
        columns(a.columns),
        tiles((a.columns + kTile - 1) / kTile),
        tile(blockIdx.x) {}
  __device__ bool are_left() const { return tile < tiles; }
  __device__ bool is_second() const { return Swiglu && span >= spans; }
  __device__ int begin() const { return (is_second() ? span - spans : span) * kSpan; }
  __device__ bool ends_tile() const { return span + 1 == all_spans; }
  __device__ bool ends_rows() const { return ends_tile() || span + 1 == spans; }
  __device__ int64_t first_row() const { return tile * kTile + (is_second() ? columns : 0); }
  __device__ void advance() {
    if (++span == all_spans) next_tile();
  }
  __device__ void next_tile() {
    tile += gridDim.x;
    span = 0;
  }
};

// Where in the ring a warp is.
struct RingPlace {
  uint32_t full, empty;  // barriers of stage 0
  int stages;
  uint32_t parity;
  int stage = 0;

  __device__ void wait_for_full() const { sm90::barrier_wait(full + 8 * stage, parity); }
  __device__ void wait_for_empty() const { sm90::barrier_wait(empty + 8 * stage, parity); }
  __device__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// One warp: all stages, each when its place in the ring is free; a lane copies a row.
template <bool Swiglu>
__device__ void fill_ring(const FewRowsProduct& a, uint32_t ring, RingPlace place,
                          Stages<Swiglu> here) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (place.parity = 1; here.are_left(); here.advance(), place.advance()) {
    const int bytes = min(kSpan, here.row_bytes - here.begin());
    const int rows = static_cast<int>(min(int64_t{kTile}, a.columns - here.tile * kTile));
    const uint32_t full = place.full + 8 * place.stage;
    place.wait_for_empty();
    if (lane == 0) sm90::barrier_expect(full, static_cast<uint32_t>(rows * bytes));
    __syncwarp();
    if (lane < rows)
      copy_bulk(
          ring + place.stage * kStageBytes + lane * kRowBytes,
          static_cast<const char*>(a.w) + (here.first_row() + lane) * here.row_bytes + here.begin(),
          bytes, full);
  }
}

// What the multiplying warps have of a tile: sums of their pieces, of both matrices with SwiGLU.
template <int Rows, bool Swiglu>
struct TileParts {
  float of[Swiglu ? 2 : 1][kWarps][Rows][kTile];
};

template <class T, bool Swiglu>
__device__ __forceinline__ void store_product(T* to, float sum, float gate_sum, float more) {
  if constexpr (Swiglu) {
    T gate, value;
    store_as(gate, gate_sum);
    store_as(value, sum);
    store_as(*to, SiluGate::at(load_as<float>(gate)).act * load_as<float>(value));
  } else {
    store_as(*to, sum + more);
  }
}

// One warp: results of all tiles.
template <class T, int Rows, bool Swiglu>
__device__ void add_up(const FewRowsProduct& a, const TileParts<Rows, Swiglu> (&parts)[2],
                       const float (&inverse)[Rows], Stages<Swiglu> here) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, r = lane / kTile, n = lane % kTile;
  const bool one_scale = a.w_scale != nullptr && a.w_scale_stride == 0;
  wait_for_kernel_ahead();
  for (int turn = 0; here.are_left(); turn ^= 1, here.next_tile()) {
    const int64_t column = here.tile * kTile + n;
    const bool is_own = r < Rows && column < a.columns;
    float more = 0.0f;
    if (is_own && a.bias != nullptr) more = load_as<float>(static_cast<const T*>(a.bias)[column]);
    // Not from the L1 cache: a kernel that begins early may find it filled before the write
    if (is_own && a.addend != nullptr)
      more += load_as<float>(__ldcg(static_cast<const T*>(a.addend) + r * a.columns + column));
    sm90::named_barrier(kMultiplied + turn, kMultiplying + kLanes);
    float sums[2] = {};
    if (is_own) {
#pragma unroll
      for (int which = 0; which < (Swiglu ? 2 : 1); ++which) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sums[which] += parts[turn].of[which][w][r][n];
      }
    }
    __syncwarp();
    sm90::named_arrive(kTaken + turn, kMultiplying + kLanes);
    if (!is_own) continue;
    const float by = (one_scale ? __ldg(a.w_scale) : 1.0f) * inverse[r];
    store_product<T, Swiglu>(static_cast<T*>(a.out) + r * a.columns + column, sums[0] * by,
                             sums[1] * by, more);
  }
}

// Four codes as two pairs of fp16.
__device__ __forceinline__ void decode(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Four sums of a tile's rows and those of x, which are independent of each other.
struct WarpSums {
  float of[4][4] = {};
  __device__ float total(int column) const {
    return of[0][column] + of[1][column] + of[2][column] + of[3][column];
  }
};

// A warp's pieces of a stage; `Full`: all of its bytes are there.
template <class T, int Rows, Weights Kind, bool Full, bool Swiglu>
__device__ void multiply(const FewRowsProduct& a, const unsigned char* stage, const T* x,
                         const Stages<Swiglu>& here, WarpSums& sums) {
  constexpr int kElement = bytes_of(Kind), kReads = 2 / kElement, kStep = kWarps * kPiece;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = lane / 4,
            warp = static_cast<int>(threadIdx.x) / kLanes;
  const int at = warp * kPiece + lane % 4 * 16, bytes = here.row_bytes - here.begin();
  const unsigned char* const from = stage + group * kRowBytes + at;
  const T* const own = x + (group < Rows ? group : 0) * (static_cast<int>(a.inner) + kPad) +
                       (here.begin() + at) / kElement;
  uint4 w[kPieces], rows[kPieces][kReads];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const bool there = Full || at + i * kStep < bytes;
    w[i] = there ? *reinterpret_cast<const uint4*>(from + i * kStep) : uint4{};
#pragma unroll
    for (int j = 0; j < kReads; ++j)
      rows[i][j] = there && group < Rows
                       ? reinterpret_cast<const uint4*>(own + i * kStep / kElement)[j]
                       : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint4 &p = rows[i][0], &q = rows[i][kReads - 1];
    if constexpr (Kind == Weights::kPlain) {
      mma<T>(sums.of[2 * i % 4], {p.x, 0, p.y, 0}, w[i].x, w[i].y);
      mma<T>(sums.of[(2 * i + 1) % 4], {p.z, 0, p.w, 0}, w[i].z, w[i].w);
    } else {
      const uint32_t codes[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
      const uint32_t of_x[8] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w};
      WarpSums of_piece;
      WarpSums& to = Kind == Weights::kCodes ? sums : of_piece;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t low, high;
        decode(codes[j], low, high);
        mma<__half>(to.of[j], {of_x[2 * j], 0, of_x[2 * j + 1], 0}, low, high);
      }
      if constexpr (Kind == Weights::kCodesOfBlocks) {  // one scale for all rows of a tile
        const int k = here.begin() + warp * kPiece + i * kStep;
        const float scale =
            k < here.row_bytes
                ? __ldg(a.w_scale + here.first_row() / 128 * a.w_scale_stride + k / 128)
                : 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) sums.of[0][c] += of_piece.total(c) * scale;
      }
    }
  }
}

// The multiplying warps: the pieces of all stages.
template <class T, int Rows, bool Swiglu, Weights Kind>
__device__ void multiply_stages(const FewRowsProduct& a, const unsigned char* ring, const T* x,
                                RingPlace place, Stages<Swiglu> here,
                                TileParts<Rows, Swiglu> (&parts)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = lane / 4,
            warp = static_cast<int>(threadIdx.x) / kLanes;
  WarpSums sums;
  float gates[2] = {};
  int tiles = 0;
  const auto put = [&](int which, float low, float high) {
    float* const to = parts[tiles % 2].of[which][warp][group < Rows ? group : 0] + lane % 4 * 2;
    to[0] = low;
    to[1] = high;
  };
  for (; here.are_left(); here.advance(), place.advance()) {
    const unsigned char* const stage = ring + place.stage * kStageBytes;
    place.wait_for_full();
    if (here.ends_rows() && here.row_bytes % kSpan != 0)
      multiply<T, Rows, Kind, false>(a, stage, x, here, sums);
    else
      multiply<T, Rows, Kind, true>(a, stage, x, here, sums);
    __syncwarp();
    if (lane == 0) sm90::barrier_arrive(place.empty + 8 * place.stage);
    if (!here.ends_rows()) continue;
    if (here.ends_tile()) {
      if (tiles >= 2) sm90::named_barrier(kTaken + tiles % 2, kMultiplying + kLanes);
      if (group < Rows) {
        put(0, sums.total(0), sums.total(1));
        if constexpr (Swiglu) put(1, gates[0], gates[1]);
      }
      __syncwarp();
      sm90::named_arrive(kMultiplied + tiles % 2, kMultiplying + kLanes);
      ++tiles;
    } else {
      gates[0] = sums.total(0);
      gates[1] = sums.total(1);
    }
    sums = {};
  }
}

template <class T, int Rows, bool Swiglu, Weights Kind>
__global__ void __launch_bounds__(kThreadsOfBlock, kResident)
    few_rows_kernel(const __grid_constant__ FewRowsProduct a, int stages, bool is_half) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t barriers[2][kMostStages];
  __shared__ TileParts<Rows, Swiglu> parts[2];
  __shared__ float inverse[Rows];                                  // of the scales of x
  T* const x = reinterpret_cast<T*>(ring + stages * kStageBytes);  // [Rows, inner + kPad]
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const RingPlace place{sm90::shared_address(barriers[0]), sm90::shared_address(barriers[1]),
                        stages, 0};
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      sm90::barrier_init(place.full + 8 * s, 1);
      sm90::barrier_init(place.empty + 8 * s, kWarps);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const Stages<Swiglu> all(a, bytes_of(Kind));
  if (warp == kWarps) return fill_ring(a, sm90::shared_address(ring), place, all);
  if (warp > kWarps) return add_up<T, Rows, Swiglu>(a, parts, inverse, all);

  const FirstGains<kMultiplying> gains(a);
  const auto meet = [] { sm90::named_barrier(kMeet, kMultiplying); };
  RowsReader<T, Rows, kMultiplying, decltype(meet)> reader(a, x, static_cast<int>(a.inner) + kPad,
                                                           meet);
  wait_for_kernel_ahead();
  if (is_half) let_next_kernel_begin();
  if (a.gain == nullptr)
    reader.read();
  else
    reader.read_normed(gains);
  float scales[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) scales[r] = 1.0f;
  if constexpr (Kind != Weights::kPlain) reader.scale_to_half(scales);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) inverse[r] = scales[r];
  }
  meet();
  multiply_stages<T, Rows, Swiglu, Kind>(a, ring, x, place, all, parts);
}

// How much of a multiprocessor's shared memory a block takes.
struct BlockMemory {
  int stages, bytes;
  bool is_half;
  explicit BlockMemory(const FewRowsProduct& a) {
    const int64_t x = a.rows * (a.inner + kPad) * 2;
    const auto stages_in = [&](int all) {
      return static_cast<int>(std::clamp<int64_t>((all - x) / kStageBytes, 0, kMostStages));
    };
    is_half = stages_in(kHalf) >= kLeastStages;
    stages = stages_in(is_half ? kHalf : kAlone);
    bytes = static_cast<int>(x) + stages * kStageBytes;
  }
};

template <class T, int Rows, bool Swiglu, Weights Kind>
void start(const FewRowsProduct& args, void* stream) {
  const auto kernel = few_rows_kernel<T, Rows, Swiglu, Kind>;
  const BlockMemory memory(args);
  MEGATRON_ASSERT(allow_shared_memory(kernel, static_cast<size_t>(memory.bytes)), "rows of ",
                  args.inner, " elements");
  // Or the memory of a multiprocessor would be divided for one block, and the next product's wait.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(
      std::min<int64_t>(multiprocessors(), (args.columns + kTile - 1) / kTile)));
  config.blockDim = dim3(kThreadsOfBlock);
  config.dynamicSmemBytes = static_cast<size_t>(memory.bytes);
  config.stream = as_stream(stream);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = args.weights_at_rest ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, memory.stages, memory.is_half),
             "a product of few rows");
}

template <class T, int Rows, bool Swiglu>
void start_kind(const FewRowsProduct& args, void* stream) {
  if (args.w_scale == nullptr) return start<T, Rows, Swiglu, Weights::kPlain>(args, stream);
  if (args.w_scale_stride == 0) return start<T, Rows, Swiglu, Weights::kCodes>(args, stream);
  start<T, Rows, Swiglu, Weights::kCodesOfBlocks>(args, stream);
}

}  // namespace

bool has_few_rows_product(const FewRowsProduct& args) {
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return is_hopper() && (args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16) &&
         args.rows >= 1 && args.rows <= kMostRowsOnGpu &&
         args.inner % (args.w_scale == nullptr ? 8 : 16) == 0 &&
         BlockMemory(args).stages >= kLeastStages && is_aligned(args.x) && is_aligned(args.w) &&
         is_aligned(args.gain) &&
         !(args.swiglu && (args.bias != nullptr || args.addend != nullptr)) &&
         !(args.w_scale_stride > 0 && args.columns % kTile != 0);
}

void few_rows_product_cuda(const FewRowsProduct& args, void* stream) {
  with_type_and_rows(args, [&](auto type, auto rows) {
    using T = decltype(type);
    constexpr int kRows = decltype(rows)::value;
    if (args.swiglu) return start_kind<T, kRows, true>(args, stream);
    start_kind<T, kRows, false>(args, stream);
  });
}

}  // namespace megatron
