// Reductions and gathers of small tensors over GPUs that reach each other's memory, in one kernel
// without a barrier. CUDA alone.
//
// Note [Lines with flags]
// A rank writes its values into the inboxes of the others in lines of 128 bytes, of which the last
// 16 hold the number of the call. Eight neighbouring threads write a line by one instruction, and
// read it by one: the link and the memory behind it pass such a line on whole, so that a reader
// that sees the number has the values: no fence, no barrier, one way through the link. (As the
// protocol LL128 of NCCL.)
//
// The lines that one block of threads works on are a channel, which counts its calls; calls of even
// and odd numbers use different halves of the inbox. A rank writes for call n after its call n - 1
// has ended, for which every other rank had sent, or passed on, what it had; that one sent it after
// its call n - 2 had ended: nobody reads what is overwritten.
//
// With `divided` each channel is reduced by one rank, which sends the result to all: less traffic
// for large tensors and many ranks, twice the latency. Values are the same.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

constexpr int kMostOneShotRanks = 8;
constexpr int64_t kOneShotLines = 32;  // of a channel
constexpr int64_t kOneShotLineBytes = 128, kOneShotValueBytes = 112;
constexpr int64_t kOneShotChannelBytes = kOneShotLines * kOneShotValueBytes;  // of values

// Bytes of the inbox of one rank with so many channels.
constexpr int64_t one_shot_inbox_bytes(int64_t ranks, int64_t channels) {
  return channels * 2 * ranks * kOneShotLines * kOneShotLineBytes;
}

struct OneShotLinks {
  int rank = 0, ranks = 1;                // at most kMostOneShotRanks
  void* inboxes[kMostOneShotRanks] = {};  // by rank, zero before the first call
  uint32_t* calls = nullptr;              // [channels], this rank's own, zero before the first call
};

enum class OneShotOp : uint8_t { kSum, kMax };

// out[i] = values of all ranks at i, combined in the order of ranks, bf16 and fp16 in fp32 and
// rounded once; then with `addend` rounded(out[i] + addend[i]). Floating types, int32 and int64;
// addends for floating types. `out` may be `values`.
struct OneShotReduction {
  OneShotLinks links;
  DType dtype = DType::kFloat32;
  OneShotOp op = OneShotOp::kSum;
  bool divided = false;
  const void* values = nullptr;  // [count], count * size <= channels * kOneShotChannelBytes
  // Of floating types, [count / row] or null: powers of two by which this rank's values are
  // multiplied first, `row` of them by each. A row is a multiple of 16 bytes.
  const float* factors = nullptr;
  int64_t row = 0;
  const void* addend = nullptr;  // [count] or null
  void* out = nullptr;
  int64_t count = 0;
};

// out [ranks, bytes] = values [bytes] of all ranks.
struct OneShotGather {
  OneShotLinks links;
  const void* values = nullptr;
  void* out = nullptr;
  int64_t bytes = 0;  // at most channels * kOneShotChannelBytes
};

// Every rank makes the same calls in the same order, each on a stream that runs them in that order.
// May be captured in graphs.
void one_shot_reduction_cuda(const OneShotReduction& args, void* stream);
void one_shot_gather_cuda(const OneShotGather& args, void* stream);

}  // namespace megatron
