// The state-space scan of Mamba-2 (SSD) and its backward in ATen: the reference that kernels are
// held against, and what runs where there is none. All is computed in fp32 (fp64 for fp64).
//
//   S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T      per head, S [P, N]
//   y[t] = S[t] C[t] + D x[t]
//
// S starts from zero where the document changes. The H / G heads of a group are neighbours and
// share B and C.
//
// Source: Dao and Gu 2024 (arXiv:2405.21060), sections 6 and 7.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/config/mamba.h"

namespace megatron {

// clip(softplus(r + bias)) in fp32 (fp64); softplus(v) = v above 20, else log1p(exp(v)).
//   r [s, b, H], bias [H]
at::Tensor time_steps(const at::Tensor& r, const at::Tensor& bias, const TimeStepLimits& limits);

struct TimeStepGrads {
  at::Tensor r;     // as r
  at::Tensor bias;  // [H] fp32 (fp64)
};
// Zero where the limits clipped.
TimeStepGrads time_steps_backward(const at::Tensor& grad, const at::Tensor& r,
                                  const at::Tensor& bias, const TimeStepLimits& limits);

// With any strides.
struct ScanOperands {
  at::Tensor x;     // [s, b, H, P]
  at::Tensor dt;    // [s, b, H] fp32 (fp64): time steps
  at::Tensor A;     // [H] fp32 (fp64), negative
  at::Tensor B, C;  // [s, b, G, N]
  at::Tensor D;     // [H] fp32 (fp64)
  at::Tensor runs;  // [s, b] document_runs() (causal_conv.h); undefined: one document
};

// The state that a sequence has reached.
struct ScanState {
  at::Tensor state = {};  // [b, H, P, N] fp32 (fp64); undefined: zero
  at::Tensor run = {};    // [b] the run that it belongs to; undefined: that of the first row
};

struct ScanResult {
  at::Tensor y;      // [s, b, H, P] as x
  at::Tensor state;  // [b, H, P, N] after the last row
};

// A last chunk with fewer rows than the others: computed as it is, or filled with rows of zeros, so
// that what a row becomes depends in no bit on how many follow it.
enum class LastChunk { kShort, kFilled };

// In chunks of this many rows: products of matrices inside a chunk, a recurrence between them.
ScanResult ssd_scan(const ScanOperands& operands, const ScanState& initial, int64_t chunk,
                    LastChunk last = LastChunk::kShort);

// The same row by row, as decoding steps compute it.
ScanResult ssd_steps(const ScanOperands& operands, const ScanState& initial);

struct ScanGrads {
  at::Tensor x, dt, A, B, C, D;  // x, B, C as these; the others in fp32 (fp64)
  at::Tensor state;              // of the initial state
};
// `dstate`: gradient of the last state; undefined: zero. `places`: where the gradients of x, dt, B
// and C are written; undefined ones are made.
ScanGrads ssd_scan_backward(const at::Tensor& dy, const at::Tensor& dstate,
                            const ScanOperands& operands, const ScanState& initial, int64_t chunk,
                            const ScanOperands& places = {});

// -- a part of a sequence as a map of states, for what is composed over parts

// The state after the part is decay * (state before it) + state.
//
// decay [b, H] fp32 (fp64); 0 where a document starts in the part. `run`: [b], as ScanState::run.
at::Tensor ssd_decay(const ScanOperands& operands, const at::Tensor& run);
at::Tensor ssd_state(const ScanOperands& operands, const at::Tensor& run, int64_t chunk);

// The gradient [b, H, P, N] of the state before the part from the part's own outputs.
at::Tensor ssd_state_grad(const at::Tensor& dy, const ScanOperands& operands, const at::Tensor& run,
                          int64_t chunk);

}  // namespace megatron
