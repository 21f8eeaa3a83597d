// The model families of Hugging Face that our GPT model computes: for each a table of tensor names
// and a list of configuration keys, both used in both directions.
//
// A new family is one row of the table in hf_families.cc, its names, and its keys.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_fields.h"
#include "megatron/models/gpt/gpt_model.h"

namespace megatron {

// How a tensor of ours is made of theirs. Rows of linear_qkv are, per key/value group: [its query
// heads | key | value].
enum class HfLayout : uint8_t {
  kSame,         // one tensor of the same shape
  kStacked,      // several of equal shape, their rows one after the other: gate, up
  kSeparateQKV,  // query, key and value as tensors of their own
  kJoinedQKV,    // one tensor: [all query heads | all keys | all values]
};

// Which rows of `part` of a layout are which of ours; `rows`: how many that part has.
std::vector<RowRun> row_runs(HfLayout layout, size_t part, int64_t rows,
                             const TransformerConfig& config);
// How many rows a part has, of `rows` of ours in `parts` parts.
int64_t rows_of_part(HfLayout layout, size_t part, size_t parts, int64_t rows,
                     const TransformerConfig& config);

// "decoder.layers.3.mlp" against "decoder.layers.*.mlp": the layer, -1 without a '*', nothing when
// it does not match.
std::optional<int64_t> layer_of(std::string_view pattern, std::string_view name);

struct HfRow {
  std::string_view ours;  // '*' stands for the layer index
  std::array<std::string_view, 3> theirs;
  HfLayout layout = HfLayout::kSame;
  bool transposed = false;  // theirs is [inputs, outputs]
};

struct HfFamily {
  std::string_view model_type;
  std::string_view architecture;
  std::string_view prefix;  // of their names; files of the bare model lack it
  std::vector<std::span<const HfRow>> rows;
  // Names that some files have in place of the table's: {in the file, in the table}.
  std::vector<std::pair<std::string_view, std::string_view>> aliases;
  // Patterns of tensors that hold no weights: masks, frequencies.
  std::vector<std::string_view> waived;
  void (*preset)(TransformerConfig& config);  // what all models of the family have in common
  void (*fields)(HfFields& fields, GPTConfig& config);  // the rest
};

std::span<const HfFamily> hf_families();
// By model_type; null: unknown.
const HfFamily* find_hf_family(std::string_view model_type);
// "llama, mistral, ..."
std::string hf_family_names();

// One tensor of a folder and the tensor of ours that it is (a part of).
struct HfTensor {
  std::string name;
  std::vector<int64_t> shape;  // as stored
  bool transposed = false;
  std::string ours;
  std::vector<int64_t> our_shape;  // global, without vocabulary padding
  std::vector<RowRun> runs;        // cover every row of theirs once
};

// How rows of ours lie in it.
TensorView view_of(const HfTensor& tensor);

// Every tensor of a model of this family and shape, in the order of ours. Every row of every tensor
// of ours is covered once. Throws Error when the family has no name for a tensor of the model.
std::vector<HfTensor> hf_tensors(const HfFamily& family, const GPTConfig& config);

// The configuration in the text of a config.json. Throws Error naming the key for what is not
// built, and for model types that are not known.
struct HfModel {
  const HfFamily* family = nullptr;
  GPTConfig config;
};
HfModel parse_hf_config(const std::string& text, const std::string& name);

// The text of a config.json, over the keys of `base` ("{}": none). Throws Error naming a setting
// that the family cannot express: what is read back must be the same architecture.
std::string write_hf_config(const HfFamily& family, const GPTConfig& config,
                            const std::string& base);

// The first setting in which two architectures differ, "name: a here, b there", or "". What does
// not shape the computation of a trained model (seeds, dropout, backends) does not count.
std::string architecture_difference(const TransformerConfig& a, const TransformerConfig& b);

}  // namespace megatron
