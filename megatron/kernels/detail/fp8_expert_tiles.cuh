// Tiles of rows that lie by expert, for kernels that cast their result (kernels/fp8/fp8_experts.h).
#pragma once

#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/fp8/fp8_experts.h"

namespace megatron {

// 128 rows of one expert, or fewer at its end; expert -1: none.
struct ExpertRowTile {
  int expert, first, count;  // the expert, its first row in x and how many it has
  int tile;                  // of the expert
  int64_t padded_before;     // padded rows of the experts before
};

struct ExpertPlan {
  ExpertRowTile* tiles;
  int* tiles_before;       // [experts + 1]
  int* firsts;             // [experts + 1]
  int64_t* padded_before;  // [experts + 1]
  float* amax;             // [experts], zeros
};

inline int64_t most_tiles(int64_t experts, int64_t rows) { return rows / kTileRows + experts; }

// Which rows every tile has, and checks of the cast; in args.workspace.
ExpertPlan plan_expert_tiles(const Fp8ExpertCast& args, int64_t num_tiles, void* stream);

// 0: not given.
__device__ __forceinline__ float given_scale(const Fp8ExpertCast& args, int expert) {
  return args.given_scale == nullptr ? 0.0f : args.given_scale[expert * args.given_stride];
}

// The scale of a tile's expert, which its first tile writes.
__device__ __forceinline__ float expert_scale(const Fp8ExpertCast& args, const ExpertRowTile& tile,
                                              const float* amax, float largest) {
  float scale = given_scale(args, tile.expert);
  if (scale == 0.0f) scale = fp8_scale(amax[tile.expert], largest);
  if (tile.tile == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    args.scale[tile.expert * kFp8ScaleElements] = scale;
    args.scale[tile.expert * kFp8ScaleElements + kFp8InverseAt] = 1.0f / scale;
  }
  return scale;
}

// Padded rows of the tile's expert in `in_columns`.
__device__ __forceinline__ int64_t padded_rows(const ExpertRowTile& tile) {
  return (tile.count + 15) / 16 * 16;
}

// The place in a tile of an expert, whose rows count from 0; blockIdx.x counts over `columns`.
__device__ __forceinline__ TilePlace place_in_expert(const ExpertRowTile& tile, int64_t columns) {
  const unsigned across = static_cast<unsigned>((columns + kTileColumns - 1) / kTileColumns);
  return TilePlace(static_cast<unsigned>(tile.tile) * across + blockIdx.x, padded_rows(tile),
                   columns);
}

// Writes the codes of this thread that are rows of the expert, at `column` of the result.
__device__ __forceinline__ void store_expert_rows(const TileCodes& codes, const TilePlace& at,
                                                  const Fp8ExpertCast& args,
                                                  const ExpertRowTile& tile, int64_t column) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
    if (at.row + r < tile.count)
      *reinterpret_cast<uint2*>(args.in_rows + (tile.first + at.row + r) * args.columns + column) =
          make_uint2(codes.left[r], codes.right[r]);
}

// Where store_block() writes the 128 x 128 blocks of an expert.
__device__ __forceinline__ Fp8BlockCast blocks_of_expert(const Fp8ExpertCast& args,
                                                         const ExpertRowTile& tile) {
  const int64_t blocks = args.columns / kFp8Block,
                row_blocks_before = tile.padded_before / kFp8Block;
  Fp8BlockCast out;
  out.square = args.square;
  out.rows = (tile.count + kFp8Block - 1) / kFp8Block * kFp8Block;
  out.columns = args.columns;
  if (args.in_rows != nullptr) {
    out.in_rows = args.in_rows + tile.first * args.columns;
    out.row_scales =
        args.row_scales + (args.square ? row_blocks_before * blocks : tile.first * blocks);
  }
  if (args.in_columns != nullptr) {
    out.in_columns = args.in_columns + args.columns * tile.padded_before;
    out.column_scales =
        args.column_scales + row_blocks_before * (args.square ? blocks : args.columns);
  }
  return out;
}

}  // namespace megatron
