// States of Mamba-2's scan and their gradients at borders of chunks, for its backward.
#pragma once

#include "megatron/kernels/detail/ssd_chunk.cuh"
#include "megatron/kernels/ssm/ssd_scan_backward.h"

namespace megatron::ssd {

constexpr int kSpan = 128;  // tokens of a chunk of the backward: two of kChunk
inline int64_t spans_of(const SsdScanArgs& scan) { return (scan.tokens + kSpan - 1) / kSpan; }

// `states` and `gradients`: rows [samples, spans, H P, N] bf16, before and after each span.
struct ScanStates {
  CUtensorMap x, dy, b, c, states, gradients;
};
void compute_states(const SsdScanBackwardArgs& args, const ScanStates& maps, cudaStream_t stream);

}  // namespace megatron::ssd
