// The gated delta rule and its backward in ATen: the reference that kernels are held against, and
// what runs where there is none. All is computed in fp32 (fp64 for fp64).
//
//   R = exp(g[t]) S[t-1],   e = beta[t] (v[t] - R^T k[t])        per head, S [K, V]
//   S[t] = R + k[t] e^T,    o[t] = S[t]^T q[t] / sqrt(K)
//
// S starts from zero where the document changes. The heads of values that share a head of queries
// and keys are neighbours.
//
// Source: Yang et al. 2024 (arXiv:2412.06464); chunks: Yang et al. 2024 (arXiv:2406.06484).
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/ssm/ssd_scan.h"

namespace megatron {

// x / sqrt(sum of squares + 1e-6) over the last dimension, in fp32 (fp64), or in bf16 where the
// rule has a kernel; and the backward, as x, in `dx` if that is defined.
at::Tensor unit_length(const at::Tensor& x);
at::Tensor unit_length_backward(const at::Tensor& grad, const at::Tensor& x,
                                const at::Tensor& dx = {});

// With any strides.
struct DeltaOperands {
  at::Tensor q, k;  // [s, b, Hk, K], k of length 1
  at::Tensor v;     // [s, b, Hv, V]
  at::Tensor g;     // [s, b, Hv] fp32 (fp64): logarithm of the decay, at most 0
  at::Tensor beta;  // [s, b, Hv] fp32 (fp64): share of the error that is written
  at::Tensor runs;  // [s, b] document_runs() (causal_conv.h); undefined: one document
};

struct DeltaResult {
  at::Tensor o;      // [s, b, Hv, V] as v
  at::Tensor state;  // [b, Hv, K, V] after the last row
};

// In chunks of this many rows: products of matrices and one triangular solve inside a chunk, a
// recurrence between them. `initial`: its state is [b, Hv, K, V].
DeltaResult delta_rule(const DeltaOperands& operands, const ScanState& initial, int64_t chunk,
                       LastChunk last = LastChunk::kShort);

// The same row by row, as decoding steps compute it.
DeltaResult delta_steps(const DeltaOperands& operands, const ScanState& initial);

struct DeltaGrads {
  at::Tensor q, k, v;  // as these
  at::Tensor g, beta;  // fp32 (fp64)
  at::Tensor state;    // of the initial state
};
// `dstate`: gradient of the last state; undefined: zero. `places`: where the gradients of v, g and
// beta are written; undefined ones are made.
DeltaGrads delta_rule_backward(const at::Tensor& grad, const at::Tensor& dstate,
                               const DeltaOperands& operands, const ScanState& initial,
                               int64_t chunk, const DeltaOperands& places = {});

// -- a part of a sequence as a map of states, for what is composed over parts

// The state after the part is decay * (state before it) + state, a product of matrices.
struct DeltaSummary {
  at::Tensor decay;  // [b, Hv, K, K]; 0 where a document starts in the part
  at::Tensor state;  // [b, Hv, K, V]
};
// `run`: [b], as ScanState::run.
DeltaSummary delta_summary(const DeltaOperands& operands, const at::Tensor& run, int64_t chunk);

// The gradient [b, Hv, K, V] of the state before the part from the part's own outputs.
at::Tensor delta_state_grad(const at::Tensor& grad, const DeltaOperands& operands,
                            const at::Tensor& run, int64_t chunk);

// Of rows that make up one chunk: what each writes for a state of zero, and what it writes less for
// each component of the state, e = U - W S. [b, Hv, s, V], [b, Hv, s, K]
struct DeltaWrites {
  at::Tensor U, W;
};
DeltaWrites delta_writes(const DeltaOperands& operands, const at::Tensor& run);

}  // namespace megatron
