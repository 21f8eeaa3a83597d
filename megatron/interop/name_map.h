// Import of safetensors with names of no known Hugging Face family: a map in YAML or JSON says
// which foreign tensors make up each of our parameters:
//
//   parameters:
//     OURS: SOURCE                          one tensor of the same shape
//     OURS: {concat: [SOURCE, ...]}         concatenated: by rows, with `dim: 1` by columns
//     OURS: {qkv: [SOURCE, SOURCE, SOURCE]} queries, keys and values: all heads of each
//     OURS: {qkv: SOURCE}                   the same as one tensor, [all queries | keys | values]
//   waived: [NAME, {name: NAME, slice: TEXT}, ...]    '*' in a name: any run of characters
//
// Within [] and {} of YAML, names with {layer} need quotes.
//
//   OURS    a parameter; {layer} matches the index of any layer, from 0, and {expert} that of any
//           expert
//   SOURCE  NAME, or {name: NAME, slice: TEXT, transpose: true}; {layer} and {expert} are those of
//           OURS. An {expert} that OURS lacks is the index of its first dimension: the sources make
//           up one expert of it
//   slice   per dimension of the tensor as stored "begin:end" (either may be absent), or an index,
//           which removes the dimension: "{layer}, 0:16, :". Taken before the transposition
//
// Every element of the source is used once or waived, and every parameter is filled.
#pragma once

#include <filesystem>
#include <optional>

#include "megatron/interop/import_weights.h"
#include "megatron/models/model_table.h"

namespace megatron {

// `source`: a .safetensors file or a folder of them. `vocab_size`: if not given, that of the
// tensors. `parameters`: if not given, those of a GPT of this configuration. Throws Error naming
// tensors or elements that are missing, left over, used twice, or of another shape.
ForeignModel open_mapped_model(const std::filesystem::path& source,
                               const std::filesystem::path& name_map,
                               const TransformerConfig& transformer,
                               std::optional<int64_t> vocab_size = {},
                               const std::optional<ParameterShapes>& parameters = {});

struct NameMapImport {
  std::filesystem::path source;
  std::filesystem::path name_map;
  std::filesystem::path root;  // where iter_0000000 is written
  TransformerConfig transformer;
  TokenizerConfig tokenizer;  // empty type: unknown; the null tokenizer
};

// Writes <root>/iter_0000000 with the weights, the configuration and the tokenizer's files. Element
// types are kept. Memory: at most twice the largest tensor.
ConvertResult import_by_name_map(const NameMapImport& request,
                                 const ConvertProgress& progress = {});

}  // namespace megatron
