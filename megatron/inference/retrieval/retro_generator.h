// Continues texts by a model with retrieval: what is retrieved for a chunk is looked up and encoded
// once, when the chunk is complete.
//
// The prompt fixes how a text is cut into chunks of m tokens: what is left over is the first one,
// so that the last one ends with the prompt. Then every m tokens complete another one, of which the
// last token already reads what was retrieved.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/inference/generator.h"

namespace megatron {

// A whole chunk of a text, at most m ids.
struct WholeChunk {
  int64_t text = 0;   // index of the prompt
  int64_t chunk = 0;  // of the text, from 0
  std::vector<int32_t> ids;
};

// Ids of the neighbours of a chunk, nearest first, none empty; those behind 2 m are cut.
using NeighborIds = std::vector<std::vector<int32_t>>;

// The neighbours of each of some chunks; of more than the model reads the first ones are taken.
using FindNeighbors = std::function<std::vector<NeighborIds>(std::span<const WholeChunk>)>;

// Columns of the neighbours of chunks as training has them: tokens [chunks, k, 2 m], filled up with
// `fill`, and there [chunks, k], 0 = there is none. On the CPU.
struct NeighborColumns {
  at::Tensor tokens, there;
};
NeighborColumns neighbor_columns(const std::vector<NeighborIds>& found, int64_t neighbors,
                                 int64_t chunk_length, int64_t fill);

// The chunks of a text whose first one has what `aligned` tokens leave over; a last one that is not
// complete is left out.
std::vector<WholeChunk> chunks_of_text(std::span<const int32_t> ids, int64_t text,
                                       int64_t chunk_length, int64_t aligned);

// As generate(), for a model of type retro, 64 texts at a time. A text depends neither on the
// others of its batch nor on whether there are any, but for rounding.
std::vector<Generation> generate_with_neighbors(Model& model, const Tokenizer& tokenizer,
                                                std::span<const std::string> prompts,
                                                const GenerateOptions& options,
                                                const FindNeighbors& find,
                                                const StreamCallback& stream = {});

// Logits [s, vocab_size] of one text by the full forward over the neighbours of its chunks, which
// end with the text: row i of `found` is of chunk i. In fp64 of such a model, else fp32; on the
// CPU.
at::Tensor full_logits_with_neighbors(Model& model, std::span<const int32_t> ids,
                                      const NeighborColumns& found);

}  // namespace megatron
