// Context parallelism: the tokens of one sequence are split over the c ranks of a group; attention
// is the only operation that communicates.
//
// Zig-zag: the s tokens are cut into 2c equal chunks and rank r holds chunks r and 2c - 1 - r, in
// that order, so that every rank has the same amount of causal work (Megatron's
// get_batch_on_this_cp_rank). Everything outside attention works on these s/c tokens as on any
// others; their positions and position ids are part of the batch.
//
//   --cp-comm-type   what is exchanged                                    refuses
//   p2p              keys and values, step by step round a ring,          sliding windows
//                    overlapped with the computation
//   all_gather       keys and values of the whole sequence, at once
//   a2a              all-to-all: each rank attends over the whole         heads that do not divide
//                    sequence with n/c heads
//   a2a+p2p          a2a inside inner groups, p2p between them            both
//
// Bytes per type: docs/parallelism.md.
//
// Source: Liu et al. 2023 (arXiv:2310.01889); Jacobs et al. 2023 (arXiv:2309.14509).
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// Positions [s/c] int64 of the tokens that `rank` of c holds. Throws Error unless 2c divides s, for
// c > 1.
at::Tensor zigzag_positions(int64_t s, int64_t c, int64_t rank,
                            const at::Device& device = at::kCPU);

// This rank's part of dimension `dim` of a tensor that is replicated on the group; the result is
// contiguous. Differentiable (the gradient of the other parts is zero). Throws as zigzag_positions.
at::Tensor zigzag_slice(const at::Tensor& x, int64_t dim, const ProcessGroup& cp);

// The inverse: gathers the parts of all ranks in sequence order. Not differentiable.
at::Tensor zigzag_gather(const at::Tensor& x, int64_t dim, const ProcessGroup& cp);

// The whole sequence [s, ...] from the parts [s/c, ...] of all ranks, differentiable: each rank
// uses it for its own tokens, so the gradient of a part is the sum over ranks, in fp32 (fp64) and
// in a fixed order. Communication: over cp, an all-gather forward, a reduce-scatter backward.
at::Tensor gather_sequence(const at::Tensor& part, const ProcessGroup& cp);

// Attention of this rank's queries over the keys of the whole sequence; equals this rank's part of
// core_attention on the whole sequence. Differentiable. A group of one rank: core_attention itself.
//
//   q             [s/c, b, n, d]     k, v  [s/c, b, g, d]: zig-zag parts
//   options       of the whole sequence: place.sample and first_head are read, positions follow
//                 from the group; a mask is [b, 1, s, s], and rings refuse it
//   document_ids  [b, s] int64 of the WHOLE sequence: tokens see their own document only;
//                 undefined: no document boundaries
//
// Communication: `cp`, by default groups.cp (or the two levels of groups.cp_hierarchy), forward and
// backward. The gradients of keys and values are summed in fp32 (fp64) in a fixed order. Throws
// Error for what the type refuses (validate_context_parallel reports it at start-up).
at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const AttentionOptions& options,
                                      const at::Tensor& document_ids, ContextParallelType type,
                                      const ParallelGroups& groups,
                                      const ProcessGroup* cp = nullptr);

// Bool [b, 1, queries, keys], True where two tokens are of different documents; positions index
// document_ids [b, s]. Undefined when document_ids is.
at::Tensor document_mask(const at::Tensor& document_ids, const at::Tensor& query_position,
                         const at::Tensor& key_position);

// Whether a layer exchanges keys and values in rings, which take no mask.
bool attends_in_rings(const TransformerConfig& model);

// Checks a model against its context-parallel layout: lengths, heads, windows, sizes of the
// hierarchy.
void validate_context_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                               Violations& violations);

}  // namespace megatron
