// Causal attention in which the tokens of a block, those of an image, attend to one another in both
// directions, without a mask: causal attention of all tokens, and that of a block's tokens to its
// later ones, whose outputs are combined by their log-sum-exps, as the blocks of ring attention.
//
// Source: Gemma 3 (arXiv:2503.19786); Liu et al. 2023 (arXiv:2310.01889).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/detail/row_ranges.h"

namespace megatron {

// A run of tokens of a sample.
struct TokenRun {
  int64_t sample = 0, first = 0, count = 0;
};

// Blocks of samples [s, b]. A row is position t of sample i, number t b + i.
struct TokenBlocks {
  int64_t tokens = 0;  // N: of all blocks, each without one
  // [N] int64, block by block: the rows of all tokens but the last, from the last one backwards;
  // and of all but the first. Query i of a block sees its leading i + 1 keys.
  at::Tensor queries, keys;
  at::Tensor places;  // [N] int64: c most + i of query i of block c
  RowRanges ranges;   // of the blocks among N
  // [N] int64: d most + j of a query that is token j of document d, as make_document_rows() has
  // them; undefined: samples are one document each
  at::Tensor document_places;
};

// Of samples of s tokens, none of whose runs crosses a border of `documents`, which make up the
// samples; none: samples are one document each. On the CPU. So that cuDNN needs few plans, the
// number of blocks is a power of two and their length a multiple of 64.
TokenBlocks make_token_blocks(std::span<const TokenRun> runs, int64_t samples, int64_t s,
                              std::span<const DocumentPlace> documents = {});
std::shared_ptr<const TokenBlocks> to_device(const std::shared_ptr<const TokenBlocks>& blocks,
                                             at::Device device);

// Why attention_with_blocks() cannot compute this, or "": it takes cuDNN. Arguments as there.
std::string why_not_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const TokenBlocks& blocks, const UnpaddedRows* documents,
                           const AttentionOptions& options);

// As core_attention(), causal but for the blocks; a window limits the tokens before a query alone.
// `documents`: make_document_rows() of those that tokens attend within; null: samples.
// Differentiable in q, k and v. The output of a query with later tokens is rounded to its type
// before it is combined, and gradients of both parts before they are added.
at::Tensor attention_with_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::shared_ptr<const TokenBlocks>& blocks,
                                 const std::shared_ptr<const UnpaddedRows>& documents,
                                 const AttentionOptions& options);

}  // namespace megatron
