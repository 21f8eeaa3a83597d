// The Hugging Face model families that Model can compute: for each a table of tensor names and a
// list of configuration keys, both used for import and export.
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
#include "megatron/models/model.h"

namespace megatron {

// How a tensor of ours is composed of Hugging Face tensors. Rows of linear_qkv are, per key/value
// group: [its query heads | key | value].
enum class HfLayout : uint8_t {
  kSame,         // one tensor of the same shape
  kStacked,      // several of equal shape, concatenated by rows: gate, up
  kSeparateQKV,  // query, key and value as separate tensors
  kJoinedQKV,    // one tensor: [all query heads | all keys | all values]
};

// Which rows of `part` of a layout are which rows of ours; `rows`: number of rows of that part.
std::vector<RowRun> row_runs(HfLayout layout, size_t part, int64_t rows,
                             const TransformerConfig& config);
// Number of rows of one part, if our tensor has `rows` rows in `parts` parts.
int64_t rows_of_part(HfLayout layout, size_t part, size_t parts, int64_t rows,
                     const TransformerConfig& config);

// Matches "decoder.layers.3.mlp" against "decoder.layers.*.mlp": the layer, -1 if the pattern has
// no '*', nothing if it does not match.
std::optional<int64_t> layer_of(std::string_view pattern, std::string_view name);

struct HfRow {
  std::string_view ours;  // '*' stands for the layer index
  std::array<std::string_view, 3> theirs;
  HfLayout layout = HfLayout::kSame;
  bool transposed = false;  // the Hugging Face weight is [inputs, outputs]
};

struct HfFamily {
  std::string_view model_type;
  std::string_view architecture;
  std::string_view prefix;  // common to all tensor names; files of the model without a head lack it
  std::vector<std::span<const HfRow>> rows;
  // Alternative names in some files: {in the file, in the table}.
  std::vector<std::pair<std::string_view, std::string_view>> aliases;
  // Patterns of tensors that hold no weights: masks, frequencies.
  std::vector<std::string_view> waived;
  void (*preset)(TransformerConfig& config);  // fields that all models of the family share
  // Fields read from or written to config.json
  void (*fields)(HfFields& fields, ModelConfig& config);
};

std::span<const HfFamily> hf_families();
// By model_type; null: unknown.
const HfFamily* find_hf_family(std::string_view model_type);
// "llama, mistral, ..."
std::string hf_family_names();

// One tensor of a Hugging Face folder and the tensor of ours that it is (a part of).
struct HfTensor {
  std::string name;
  std::vector<int64_t> shape;  // as stored
  bool transposed = false;
  std::string ours;
  std::vector<int64_t> our_shape;  // global, without vocabulary padding
  std::vector<RowRun> runs;        // cover every row of the stored tensor once
};

// Where rows of ours are in the stored tensor.
TensorView view_of(const HfTensor& tensor);

// Every tensor of a model of this family and shape, in our model order. They cover every row of our
// tensors once. Throws Error if the family has no name for a tensor of the model.
std::vector<HfTensor> hf_tensors(const HfFamily& family, const ModelConfig& config);

// Parses the text of a config.json. Throws Error for unknown model types, and for features that are
// not built, naming the key.
struct HfModel {
  const HfFamily* family = nullptr;
  ModelConfig config;
};
HfModel parse_hf_config(const std::string& text, const std::string& name);

// The text of a config.json; keys of `base` ("{}": none) that are not set here are kept. Throws
// Error naming a setting that the family cannot express: reading the text back must give the same
// architecture.
std::string write_hf_config(const HfFamily& family, const ModelConfig& config,
                            const std::string& base);

// The first setting in which two architectures differ, "name: a here, b there", or "". Settings
// that do not affect what a trained model computes (seeds, dropout, backends) are ignored.
std::string architecture_difference(const TransformerConfig& a, const TransformerConfig& b);

}  // namespace megatron
