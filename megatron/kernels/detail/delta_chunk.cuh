// What the kernels of the gated delta rule share.
#pragma once

#include "megatron/kernels/detail/ssd_chunk.cuh"
#include "megatron/kernels/ssm/gated_delta.h"

namespace megatron::delta {

using ssd::kChunk;
using ssd::kGroupThreads;
using ssd::kPanel;

// Time steps of heads of values are their logarithms of decays.
inline ssd::StepSource step_source(const GatedDeltaArgs& args) {
  return {args.g,
          nullptr,
          args.documents,
          args.initial_document,
          static_cast<int>(args.tokens),
          static_cast<int>(args.samples),
          static_cast<int>(args.value_heads)};
}

// What a chunk's tokens weigh, for one head of values.
struct DeltaDecays {
  float sum[kChunk];   // running sum of g log2(e), of this token too
  float keep[kChunk];  // decay of the state before the chunk, 0 behind a border
  float rest[kChunk];  // decay until the end of the chunk, 0 before a border
  int start[kChunk];   // where in the chunk the document of this token starts; -1: before it
  float decay;         // of the state over the whole chunk
  int has_border;
  int padding[2];
};
__device__ __forceinline__ void write_decays(const ssd::LaneDecays& mine, DeltaDecays& out,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * lane + i;
    out.sum[j] = mine.sum[i];
    out.keep[j] = mine.keep(i);
    out.rest[j] = mine.rest(i, lane);
    out.start[j] = mine.start[i];
  }
  if (lane == 0) {
    out.decay = mine.decay();
    out.has_border = mine.has_border;
  }
}

// S^T (rows: columns of v) as the sums of a product of a warpgroup. `at`: the first of a thread in
// memory, where the state is [K, V] with rows of `values`.
template <int kSums>
__device__ __forceinline__ void read_transposed(float (&state)[kSums], const float* from,
                                                int64_t at, int64_t values) {
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    state[i] = from ? from[at + (8 * (i / 4) + i % 2) * values + i % 4 / 2 * 8] : 0.0f;
}
template <int kSums>
__device__ __forceinline__ void write_transposed(const float (&state)[kSums], float* to, int64_t at,
                                                 int64_t values) {
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    to[at + (8 * (i / 4) + i % 2) * values + i % 4 / 2 * 8] = state[i];
}
// Sums of a product [64, 16 kSteps] as the left operand of the next.
template <int kSteps>
__device__ __forceinline__ void pack_sums(uint32_t (&to)[kSteps][4],
                                          const float (&sums)[8 * kSteps]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[k][i] = sm90::pack2(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
  }
}
// That operand to panels of 64 columns. write_row, matrix as in write_state_panels.
template <int kSteps>
__device__ __forceinline__ void store_packed(uint32_t to, const uint32_t (&a)[kSteps][4],
                                             int write_row, int matrix) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    sm90::store_matrices(
        to + k / 4 * kPanel + sm90::panel_piece(write_row, (2 * k + matrix / 2) % 8), a[k][0],
        a[k][1], a[k][2], a[k][3]);
}

// Rows [tokens, samples, heads, size] of the workspace.
inline ScanRows contiguous_rows(void* data, int64_t samples, int64_t columns) {
  return {data, samples * columns, columns};
}
struct WorkRows {
  ScanRows w, u;
};
inline WorkRows work_rows(const GatedDeltaArgs& args) {
  const int64_t w_columns = args.value_heads * args.key_size,
                u_columns = args.value_heads * args.value_size;
  return {contiguous_rows(args.workspace, args.samples, w_columns),
          contiguous_rows(
              static_cast<char*>(args.workspace) + 2 * args.tokens * args.samples * w_columns,
              args.samples, u_columns)};
}
// Tiles of 64 rows of `columns`, one after another.
inline CUtensorMap tile_map(void* data, int64_t tiles, int64_t columns) {
  return sm90::panel_map(data, columns, 1, 64 * tiles, columns, columns, 64);
}
inline CUtensorMap map_of(const GatedDeltaArgs& args, const ScanRows& rows, int64_t columns) {
  return sm90::panel_map(rows.data, columns, args.samples, args.tokens, rows.sample, rows.token,
                         kChunk);
}

// W and U of all chunks, to the workspace; and their inverses T, bf16 [samples, chunks, heads, 64,
// 64], where `inverses` is not null.
void compute_writes(const GatedDeltaArgs& args, void* inverses, cudaStream_t stream);

}  // namespace megatron::delta
