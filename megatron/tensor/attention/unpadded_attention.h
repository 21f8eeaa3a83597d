// Attention within each sample of a micro-batch without padding.
#pragma once

#include <memory>
#include <optional>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

// Rows of queries, and those of the keys of the same samples if they are other tokens (cross
// attention, in which nobody attends to holes); null: the same rows.
struct AttendedRows {
  std::shared_ptr<const UnpaddedRows> queries;
  std::shared_ptr<const UnpaddedRows> keys = nullptr;
  const UnpaddedRows& of_keys() const { return keys != nullptr ? *keys : *queries; }
};

// As core_attention(). Empty rows attend to nothing: they get zeros, and no gradient. On CPUs each
// sample is computed by itself. On GPUs, where no sample has holes, cuDNN computes ranges of rows,
// with a bias by distance or a narrow window a kernel of our own; else samples are padded, for the
// attention alone. Without such a kernel the backward runs the forward again.
//
//   q       [R, 1, n, d]      k [R_k, 1, g, d]      v [R_k, 1, g, v]
//   return  [R, 1, n, v]
//
// Options as for samples with padding, [b, s], without a mask; places are set here.
at::Tensor unpadded_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttendedRows& rows, const AttentionOptions& options);

// One of these ways, differentiable: all samples at once, with padding.
at::Tensor attention_with_padding(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttendedRows& rows, const AttentionOptions& options);

// Self-attention over packed projections, as packed_attention(): [R, 1, g * (r + 2) * d] to [R, 1,
// g * r * d].
at::Tensor unpadded_packed_attention(const at::Tensor& packed, const PackedHeads& heads,
                                     const RotaryAngles& rotary, const AttendedRows& rows,
                                     const AttentionOptions& options);

// Self-attention within documents of samples [s, b] (make_document_rows()), as packed_attention()
// and core_attention() with a mask of the others: cuDNN's ranges of rows, on GPUs. std::nullopt: it
// does not compute this attention, whose options are as for the mask.
std::optional<at::Tensor> packed_attention_of_documents(const at::Tensor& packed,
                                                        const PackedHeads& heads,
                                                        const RotaryAngles& rotary,
                                                        const AttendedRows& documents,
                                                        const AttentionOptions& options);
std::optional<at::Tensor> attention_of_documents(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v, const AttendedRows& documents,
                                                 const AttentionOptions& options);

}  // namespace megatron
