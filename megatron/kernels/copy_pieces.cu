#include <algorithm>

#include "megatron/kernels/copy_pieces.h"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {
namespace {

constexpr int kMostPieces = 120;  // of a launch, whose parameters have 4 KB
constexpr int kCopyThreads = 512;
constexpr int kInFlight = 4;  // loads of a thread
constexpr int64_t kTileWords = int64_t{kCopyThreads} * kInFlight;
// Enough for the links of a GPU, as each block has 32 KB in flight.
constexpr int64_t kMostBlocks = 32;

struct Pieces {
  const void* from[kMostPieces];
  void* to[kMostPieces];
  int64_t words[kMostPieces];  // of 16 bytes, or -n: n words of 4 bytes
  int tiles_before[kMostPieces + 1];
  int count;
};

template <class Word>
__device__ __forceinline__ void copy_tile(const void* from, void* to, int64_t words,
                                          int64_t first) {
  Word values[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i)
    if (first + i * kCopyThreads < words)
      values[i] = __ldcs(static_cast<const Word*>(from) + first + i * kCopyThreads);
#pragma unroll
  for (int i = 0; i < kInFlight; ++i)
    if (first + i * kCopyThreads < words)
      static_cast<Word*>(to)[first + i * kCopyThreads] = values[i];
}

__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ Pieces pieces) {
  int piece = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < pieces.tiles_before[pieces.count];
       tile += static_cast<int>(gridDim.x)) {
    while (pieces.tiles_before[piece + 1] <= tile) ++piece;
    const int64_t first = int64_t{tile - pieces.tiles_before[piece]} * kTileWords + threadIdx.x,
                  words = pieces.words[piece];
    if (words >= 0)
      copy_tile<uint4>(pieces.from[piece], pieces.to[piece], words, first);
    else
      copy_tile<unsigned>(pieces.from[piece], pieces.to[piece], -words, first);
  }
  __threadfence_system();
}

bool is_aligned(const PieceCopy& piece, uintptr_t bytes) {
  return (reinterpret_cast<uintptr_t>(piece.from) | reinterpret_cast<uintptr_t>(piece.to) |
          static_cast<uintptr_t>(piece.bytes)) %
             bytes ==
         0;
}

}  // namespace

void load_copy_pieces_cuda() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, copy_kernel), "loading copies of pieces");
}

bool fits_copy_pieces(const PieceCopy& piece) { return is_aligned(piece, 4); }

void copy_pieces_cuda(std::span<const PieceCopy> pieces, void* stream) {
  for (size_t first = 0; first < pieces.size(); first += kMostPieces) {
    Pieces some{};
    some.count = static_cast<int>(std::min<size_t>(kMostPieces, pieces.size() - first));
    for (int i = 0; i < some.count; ++i) {
      const PieceCopy& piece = pieces[first + static_cast<size_t>(i)];
      MEGATRON_ASSERT(fits_copy_pieces(piece), "a copy of ", piece.bytes,
                      " bytes that are not whole words");
      some.from[i] = piece.from;
      some.to[i] = piece.to;
      some.words[i] = is_aligned(piece, 16) ? piece.bytes / 16 : -piece.bytes / 4;
      const int64_t words = some.words[i] < 0 ? -some.words[i] : some.words[i];
      some.tiles_before[i + 1] =
          some.tiles_before[i] + static_cast<int>((words + kTileWords - 1) / kTileWords);
    }
    const int64_t tiles = some.tiles_before[some.count];
    if (tiles == 0) continue;
    copy_kernel<<<static_cast<unsigned>(std::min(kMostBlocks, tiles)), kCopyThreads, 0,
                  as_stream(stream)>>>(some);
    check_cuda(cudaGetLastError(), "copies of pieces");
  }
}

}  // namespace megatron
