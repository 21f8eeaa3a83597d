// The Hugging Face model families that our models can compute: for each a table of tensor names and
// a list of configuration keys, both used for import and export.
//
// A new family is one row of the table in hf_dense_families.cc, hf_moe_families.cc,
// hf_hybrid_families.cc, hf_encoder_families.cc, hf_multimodal_families.cc or hf_t5_families.cc,
// its names, and its keys.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_fields.h"
#include "megatron/models/model_table.h"

namespace megatron {

// How a tensor of ours is composed of Hugging Face tensors. Rows of linear_qkv are, per key/value
// group: [its query heads | key | value], with --attention-output-gate [its query heads | their
// gates | key | value].
enum class HfLayout : uint8_t {
  kSame,           // one tensor of the same shape
  kStacked,        // several of equal shape, concatenated by rows: gate, up
  kSeparateQKV,    // query, key and value as separate tensors; of each head [query | gate]
  kSeparateKV,     // key and value as separate tensors, of each head [key | value] in ours
  kJoinedQKV,      // one tensor: [all query heads | all keys | all values]
  kAlternating,    // one tensor of all experts, in which rows of gate and up alternate
  kQueryValue,     // of biases: query and value as separate tensors; keys have none, zeros in ours
  kSeparateDelta,  // of a gated delta net: query, key and value together, z, beta, alpha
};

// Which rows of `part` of a layout are which rows of ours; `rows`: number of rows of that part.
std::vector<RowRun> row_runs(HfLayout layout, size_t part, int64_t rows,
                             const TransformerConfig& config);
// Number of rows of one part, if our tensor has `rows` rows in `parts` parts.
int64_t rows_of_part(HfLayout layout, size_t part, size_t parts, int64_t rows,
                     const TransformerConfig& config);

// The numbers that each '*' of a pattern stands for in a name: {3, 7} for "layers.*.experts.*" in
// "layers.3.experts.7"; nothing if the name does not match.
std::optional<std::vector<int64_t>> indices_of(std::string_view pattern, std::string_view name);
// The reverse. Only whole names may follow: as many indices as '*'.
std::string with_indices(std::string_view pattern, std::span<const int64_t> indices);

// In the names '*' stands for an index: the layer, then the expert; '@' for "weight" and "bias";
// and a '.' at the beginning for the path of a layer: HfFamily::our_layers and HfFamily::layers.
// Such a row holds for the layers of multi-token prediction, too, "mtp.layers.*.transformer_layer",
// which follow those of the decoder in their files.
//
// Of several rows for one parameter the first is written; read is the one whose tensor the files
// hold.
struct HfRow {
  std::string_view ours;
  // Its parts in order. With one '*' more than ours: one tensor for each expert, where ours is
  // [experts, ...] and the layout is that of an expert.
  std::vector<std::string_view> theirs;
  HfLayout layout = HfLayout::kSame;
  bool transposed = false;  // the Hugging Face weight is [inputs, outputs], that of every expert
  bool (*of)(const TransformerConfig& config) = nullptr;  // whether models have it; null: all have
  // A parameter of ours that models with this row have, too; empty: none
  std::string_view beside = {};
  // The shape of the Hugging Face tensor where the same elements have another one than in ours
  // (convolutions); null: it is the same
  std::vector<int64_t> (*stored_shape)(const std::vector<int64_t>& ours) = nullptr;
};

// Whether a folder holds a tensor of this name.
using HfNames = std::function<bool(const std::string& name)>;

// Folders of a larger model, of which these families read the text: its settings are those under
// "text_config", and its names have a prefix in place of HfFamily::prefix.
struct HfEnclosing {
  std::string_view model_type;
  std::string_view prefix;
};

struct HfFamily {
  std::string_view model_type;
  std::string_view architecture;
  std::vector<std::span<const HfRow>> rows;
  void (*preset)(TransformerConfig& config);  // fields that all models of the family share
  // Fields read from or written to config.json
  void (*fields)(HfFields& fields, ModelConfig& config);
  // Common to all tensor names; files of the model without a head lack it
  std::string_view prefix = "model.";
  std::string_view layers = "model.layers.*";
  // Alternative names in some files: {in the file, in the table}.
  std::vector<std::pair<std::string_view, std::string_view>> aliases = {};
  // Patterns of tensors that hold no weights: masks, frequencies.
  std::vector<std::string_view> waived = {"model.layers.*.self_attn.rotary_emb.inv_freq"};
  // What each layer of multi-token prediction repeats: {ours, theirs within the layer}.
  std::vector<std::pair<std::string_view, std::string_view>> copies = {};
  std::string_view type = "gpt";  // of the model (models/model_table.h)
  std::string_view our_layers = "decoder.layers.*";
  int64_t sublayers = 1;  // layers of ours that one of theirs is: 2, the letters of mixer and MLP
  // Of a model without a head; its files lack the prefix. Empty: none is written
  std::string_view bare_architecture = {};
  HfEnclosing enclosing = {};  // with an empty model_type: none
  // Changes the model to what the files of a folder hold, by the table's names; null: nothing
  void (*fit)(const HfFamily& family, const HfNames& held, ModelConfig& config) = nullptr;
  // Alternative beginnings of names: {in the file, in the table}. An export has those of the folder
  // that was imported.
  std::vector<std::pair<std::string_view, std::string_view>> beginnings = {};
  // The configuration of the module that a parameter of ours belongs to; null: of the only one
  TransformerConfig (*part)(const ModelConfig& config, std::string_view ours) = nullptr;
  // Names of tensors that models of this config.json do not compute with: those that a folder holds
  // are kept beside a checkpoint and written back. Null: there are none
  std::vector<std::string> (*carried)(HfFields& fields, const ModelConfig& config) = nullptr;
};

std::span<const HfFamily> hf_families();
// By model_type; null: unknown.
const HfFamily* find_hf_family(std::string_view model_type);
// "llama, mistral, ..."
std::string hf_family_names();

// One tensor of a Hugging Face folder and the tensor of ours that it is (a part of).
struct HfTensor {
  std::string name;
  std::vector<int64_t> shape;     // as stored, but for `reshaped`
  std::vector<int64_t> reshaped;  // the stored shape of the same elements; empty: `shape`
  const std::vector<int64_t>& stored_shape() const { return reshaped.empty() ? shape : reshaped; }
  bool transposed = false;
  std::string ours;
  std::vector<int64_t> our_shape;  // global, without vocabulary padding
  int64_t expert = -1;             // the part of ours along its first dimension; -1: all of it
  std::vector<RowRun> runs;        // cover every row of the stored tensor once
  std::vector<RowRun> zeros = {};  // rows of ours that no tensor has, and that are zero
  bool alternating = false;        // of all experts, whose rows of gate and up alternate
};

// Where rows of ours are in the stored tensor.
TensorView view_of(const HfTensor& tensor);

// The same of a tensor of all experts that are not stored as ours are: of each of them.
struct HfExpertView {
  int64_t expert = 0;
  TensorView view;  // of some of the expert's rows
  RowRun run;       // which of ours they are
};
std::vector<HfExpertView> expert_views(const HfTensor& tensor);
// Whether it is such a tensor.
bool has_expert_views(const HfTensor& tensor);

// What a rank holds that keeps only this part of ours, in rows and columns as ours: in the order in
// which the Hugging Face tensor, or its transpose, is stored.
ShardedTensor part_of_ours(const HfTensor& tensor, DType dtype);

// Every tensor of a model of this family and shape, in our model order. They cover every row of our
// tensors once, but for zeros. Throws Error if the family has no name for a tensor of the model.
// `parameters`: those of the model. `held`: those of the folder that is read; empty: for writing.
std::vector<HfTensor> hf_tensors(const HfFamily& family, const ModelConfig& config,
                                 const HfNames& held = {});
std::vector<HfTensor> hf_tensors(const HfFamily& family, const TransformerConfig& config,
                                 const ParameterShapes& parameters, const HfNames& held = {});

// The tensors that layers of multi-token prediction repeat: each equals another one of the files.
std::vector<HfTensor> hf_copies(const HfFamily& family, const ModelConfig& config);

// Where names of experts go beyond the model, "model.layers.3.mlp.experts.8.w1.weight" with 8
// experts: the names with the expert's index as '*', and the index; else nothing.
std::optional<std::pair<std::string, int64_t>> expert_of_name(const HfFamily& family,
                                                              std::string_view name);

// Parses the text of a config.json. Throws Error for unknown model types, and for features that are
// not built, naming the key.
struct HfModel {
  const HfFamily* family = nullptr;
  ModelConfig config;
  std::string quantization;          // "fp8": E4M3 in blocks; "mxfp4"; empty: none
  DType dtype = DType::kBFloat16;    // of quantised weights, when they have become numbers again
  std::vector<std::string> carried;  // HfFamily::carried
};
HfModel parse_hf_config(const std::string& text, const std::string& name);
// The configuration of the model that is read: of a larger one (HfEnclosing) that of its text, with
// what it says itself of tied tables, types and quantised weights; any other text as it is.
std::string hf_config_of_text_model(const std::string& text, const std::string& name);

// The text of a config.json; keys of `base` ("{}": none) that are not set here are kept. Throws
// Error naming a setting that the family cannot express: reading the text back must give the same
// architecture.
std::string write_hf_config(const HfFamily& family, const ModelConfig& config,
                            const std::string& base);

// The first setting in which two architectures differ, "name: a here, b there", or "". Settings
// that do not affect what a trained model computes (seeds, dropout, backends) are ignored.
std::string architecture_difference(const TransformerConfig& a, const TransformerConfig& b);

}  // namespace megatron
