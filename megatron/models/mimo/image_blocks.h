// Images as blocks of tokens that attend to one another in both directions, in a decoder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "megatron/tensor/attention/token_blocks.h"

namespace megatron {

// The runs of image tokens in tokens [b, s] of `samples` samples, each within its document;
// `documents`: as make_token_blocks().
TokenBlocks image_blocks(std::span<const int64_t> tokens, int64_t samples, int64_t image_token,
                         std::span<const DocumentPlace> documents = {});

// Bool [b, 1, s, s], True where a query may NOT attend to a key: it may to itself, to those before
// it, and, within a run of image tokens of tokens [b, s], to all of the run; of these to those of
// its document. A window that limits the past is no part of it. As Gemma 3 in transformers, where
// images without text between them are one run, too.
//
// `document_ids`: [b, s] int64; undefined: no boundaries.
at::Tensor image_block_mask(const at::Tensor& tokens, int64_t image_token,
                            const at::Tensor& document_ids);

}  // namespace megatron
