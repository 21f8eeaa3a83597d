// What the kernels of Mamba-2's scan share: decays of a chunk of 64 tokens, computed by one warp,
// and states in the registers of a warpgroup.
#pragma once

#include "megatron/kernels/detail/sm90.cuh"
#include "megatron/kernels/ssm/ssd_scan.h"

namespace megatron::ssd {

constexpr int kChunk = 64;
constexpr int kGroupThreads = 128;
constexpr int kPanel = kChunk * sm90::kPanelRowBytes;  // bytes of 64 rows

// Where time steps and borders of documents come from.
struct StepSource {
  const float *dt, *a;  // a null: 1
  ScanDocuments documents;
  const int64_t* initial_document;
  int tokens, samples, heads;
};
inline StepSource step_source(const SsdScanArgs& args) {
  return {args.dt,
          args.a,
          args.documents,
          args.initial_document,
          static_cast<int>(args.tokens),
          static_cast<int>(args.samples),
          static_cast<int>(args.heads)};
}

// What a lane reads of its two tokens of a chunk.
struct RawSteps {
  float dt[2];          // 0 behind the last token
  int64_t document[3];  // before the first, the two
};
// Copies for chunks to come; each lane reads what it copied itself.
constexpr int kStepsAhead = 4;
struct StepRing {
  int64_t document[kStepsAhead][3][32];
  float dt[kStepsAhead][2][32];
};
struct HeadSteps {
  const StepSource& of;
  const float* dt;
  const int64_t* documents;
  int sample;
  float a;  // A log2(e)

  __device__ HeadSteps(const StepSource& source, int head, int which) : of(source), sample(which) {
    dt = source.dt + which * source.heads + head;
    documents =
        source.documents.ids ? source.documents.ids + which * source.documents.sample : nullptr;
    a = (source.a ? source.a[head] : 1.0f) * 1.4426950408889634f;
  }
  __device__ RawSteps fetch(int chunk, int lane) const {
    RawSteps steps{};
    const int token = chunk * kChunk + 2 * lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (token + i < of.tokens) steps.dt[i] = *dt_at(token + i);
    }
    if (documents) {
#pragma unroll
      for (int i = 0; i < 3; ++i) steps.document[i] = *document_at(token + i - 1);
    }
    return steps;
  }
  // Starts the copies of a chunk into place `slot`; none for chunks that are not there.
  __device__ void start(StepRing& ring, int slot, int chunk, int chunks, int lane) const {
    const int token = chunk * kChunk + 2 * lane;
    if (chunk >= 0 && chunk < chunks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& to = ring.dt[slot][i][lane];
        if (token + i < of.tokens)
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(sm90::shared_address(&to)),
                       "l"(dt_at(token + i))
                       : "memory");
        else
          to = 0.0f;
      }
      if (documents) {
#pragma unroll
        for (int i = 0; i < 3; ++i)
          asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                           sm90::shared_address(&ring.document[slot][i][lane])),
                       "l"(document_at(token + i - 1))
                       : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Of the chunk that was started first of the last kStepsAhead.
  __device__ RawSteps take(const StepRing& ring, int slot, int lane) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStepsAhead - 1) : "memory");
    RawSteps steps{};
#pragma unroll
    for (int i = 0; i < 2; ++i) steps.dt[i] = ring.dt[slot][i][lane];
    if (documents) {
#pragma unroll
      for (int i = 0; i < 3; ++i) steps.document[i] = ring.document[slot][i][lane];
    }
    return steps;
  }

 private:
  __device__ const float* dt_at(int token) const {
    return dt + static_cast<int64_t>(token) * of.samples * of.heads;
  }
  __device__ const int64_t* document_at(int token) const {
    if (token < 0 && of.initial_document) return of.initial_document + sample;
    return documents + min(max(token, 0), of.tokens - 1) * of.documents.token;
  }
};

// What a chunk's tokens weigh, for one head.
struct ChunkDecays {
  float2 sum_step[kChunk];  // running sum of dt A log2(e), of this token too; dt
  float keep[kChunk];       // decay of the state before the chunk, 0 behind a border
  float weight[kChunk];     // of x in the state after the chunk: dt times the decay until its end
  int start[kChunk];        // where in the chunk the document of this token starts; -1: before it
  float decay;              // of the state over the whole chunk
  int has_border;
  int padding[2];
};

// The same as a lane holds it for tokens 2 lane, 2 lane + 1. All lanes of a warp construct it.
struct LaneDecays {
  float step[2], sum[2], total;  // total: sum of the chunk
  int start[2], last;            // last: where the last document starts, or -1
  bool has_border;

  __device__ LaneDecays(const RawSteps& raw, float a, int lane) {
    step[0] = raw.dt[0], step[1] = raw.dt[1];
    sum[0] = step[0] * a;
    sum[1] = sum[0] + step[1] * a;
    float before = sum[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, before, offset);
      if (lane >= offset) before += other;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0.0f;
    sum[0] += before;
    sum[1] += before;
    total = __shfl_sync(0xffffffffu, sum[1], 31);
    const unsigned first = __ballot_sync(0xffffffffu, raw.document[0] != raw.document[1]),
                   second = __ballot_sync(0xffffffffu, raw.document[1] != raw.document[2]);
    const unsigned until = 0xffffffffu >> (31 - lane), below = until >> 1;
    last = last_of(first, second);
    start[0] = last_of(first & until, second & below);
    start[1] = last_of(first & until, second & until);
    has_border = (first | second) != 0;
  }
  // Of token 2 lane + i: the decay of the state before the chunk until it, 0 behind a border, and
  // of what it adds until the end of the chunk, 0 before one.
  __device__ float keep(int i) const { return start[i] < 0 ? exp2f(sum[i]) : 0.0f; }
  __device__ float rest(int i, int lane) const {
    return 2 * lane + i >= last ? exp2f(fminf(total - sum[i], 0.0f)) : 0.0f;
  }
  __device__ float decay() const { return last < 0 ? exp2f(total) : 0.0f; }

 private:
  // The last set bit of tokens with even and odd number.
  __device__ static int last_of(unsigned even, unsigned odd) {
    const int e = 31 - __clz(even), o = 31 - __clz(odd);
    return max(e < 0 ? -1 : 2 * e, o < 0 ? -1 : 2 * o + 1);
  }
};

__device__ __forceinline__ void write_decays(const LaneDecays& mine, ChunkDecays& out, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * lane + i;
    out.sum_step[j] = make_float2(mine.sum[i], mine.step[i]);
    out.keep[j] = mine.keep(i);
    out.weight[j] = mine.rest(i, lane) * mine.step[i];
    out.start[j] = mine.start[i];
  }
  if (lane == 0) {
    out.decay = mine.decay();
    out.has_border = mine.has_border;
  }
}

// One warp computes the decays of all chunks into a ring of kStages, each when it is empty.
template <int kStages, class Decays, class ChunkAt>
__device__ __forceinline__ void compute_decays(const HeadSteps& steps, StepRing& ring,
                                               Decays* decays, uint32_t full, uint32_t empty,
                                               int chunks, int lane, const ChunkAt& chunk_at) {
#pragma unroll
  for (int i = 0; i < kStepsAhead; ++i) steps.start(ring, i, chunk_at(i), chunks, lane);
  int stage = 0, parity = 1;
  for (int i = 0; i < chunks; ++i) {
    const LaneDecays mine(steps.take(ring, i % kStepsAhead, lane), steps.a, lane);
    steps.start(ring, i % kStepsAhead, chunk_at(i + kStepsAhead), chunks, lane);
    sm90::barrier_wait(empty + 8 * stage, parity);
    write_decays(mine, decays[stage], lane);
    sm90::barrier_arrive(full + 8 * stage);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

__device__ __forceinline__ unsigned char* aligned_shared(unsigned char* raw) {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                          ~uintptr_t{1023});
}

// A state [64, kColumns] is the sums of a product of a warpgroup: row 16 warp + lane / 4 (+ 8),
// column 8 i + 2 (lane % 4) (+ 1). `at`: the thread's first element in rows of kRow.
template <int kColumns, int kRow = kColumns>
__device__ __forceinline__ void read_state(float (&state)[kColumns / 2], const float* from,
                                           int64_t at) {
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    float2 low{0.0f, 0.0f}, high{0.0f, 0.0f};
    if (from) {
      low = *reinterpret_cast<const float2*>(from + at + 8 * i);
      high = *reinterpret_cast<const float2*>(from + at + 8 * kRow + 8 * i);
    }
    state[4 * i] = low.x, state[4 * i + 1] = low.y;
    state[4 * i + 2] = high.x, state[4 * i + 3] = high.y;
  }
}
template <int kColumns, int kRow = kColumns>
__device__ __forceinline__ void write_state(const float (&state)[kColumns / 2], float* to,
                                            int64_t at) {
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    *reinterpret_cast<float2*>(to + at + 8 * i) = make_float2(state[4 * i], state[4 * i + 1]);
    *reinterpret_cast<float2*>(to + at + 8 * kRow + 8 * i) =
        make_float2(state[4 * i + 2], state[4 * i + 3]);
  }
}
// As bf16 in panels of 64 columns. write_row: 16 warp + (lane / 8 % 2) 8 + lane % 8; matrix:
// lane / 8.
template <int kColumns>
__device__ __forceinline__ void write_state_panels(uint32_t to, const float (&state)[kColumns / 2],
                                                   int write_row, int matrix) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    const int piece = 2 * i + matrix / 2;
    const float* const s = state + 8 * i;
    sm90::store_matrices(to + piece / 8 * kPanel + sm90::panel_piece(write_row, piece % 8),
                         sm90::pack2(s[0], s[1]), sm90::pack2(s[2], s[3]), sm90::pack2(s[4], s[5]),
                         sm90::pack2(s[6], s[7]));
  }
}
// The columns of a panel as rows of an operand, each row of the panel times its weight. read_row:
// (lane / 16) 8 + lane % 8; read_piece: 2 warp + lane / 8 % 2.
template <int kSteps>
__device__ __forceinline__ void load_weighted(uint32_t (&a)[kSteps][4], uint32_t panel,
                                              int read_row, int read_piece, const float* weights,
                                              int lane) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    sm90::load_transposed(a[k], panel + sm90::panel_piece(16 * k + read_row, read_piece));
    const float* const w = weights + 16 * k + 2 * (lane % 4);
    const float2 low = *reinterpret_cast<const float2*>(w),
                 high = *reinterpret_cast<const float2*>(w + 8);
    a[k][0] = sm90::pack2(sm90::low_of(a[k][0]) * low.x, sm90::high_of(a[k][0]) * low.y);
    a[k][1] = sm90::pack2(sm90::low_of(a[k][1]) * low.x, sm90::high_of(a[k][1]) * low.y);
    a[k][2] = sm90::pack2(sm90::low_of(a[k][2]) * high.x, sm90::high_of(a[k][2]) * high.y);
    a[k][3] = sm90::pack2(sm90::low_of(a[k][3]) * high.x, sm90::high_of(a[k][3]) * high.y);
  }
}

}  // namespace megatron::ssd
