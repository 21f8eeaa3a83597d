// Loads a model, its weights and its tokenizer from a checkpoint or a Hugging Face folder, for
// inference and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/model.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

class Agreement;
struct HfFamily;
struct ParallelGroups;

struct LoadModelRequest {
  // A folder of checkpoints or one checkpoint (ours, or Megatron-LM's torch_dist), a Hugging Face
  // folder (told apart by is_hf_folder(), huggingface/hf_folder.h), or a GGUF file.
  std::filesystem::path load;
  std::filesystem::path adapter;        // a PEFT folder with adapters for that model; empty: none
  std::optional<int64_t> ckpt_step;     // none: the newest iteration
  std::optional<at::ScalarType> dtype;  // default: as stored
  at::Device device = at::kCPU;
  // Linears multiply in FP8, with the weights held in FP8 alone; blockwise or tensorwise.
  std::optional<Fp8Recipe> fp8;
  // On a CPU: linears multiply in 8-bit integers (kernels/int8/int8_product.h), with the weights
  // held in 8 bits alone from their first use on. Throws Error, before weights are read, if the
  // model cannot be.
  bool int8 = false;
  // Weights are drawn as training begins with them, and not read: of a folder of Hugging Face
  // config.json is enough, and `dtype` must be given. To measure speed and memory.
  bool dummy_weights = false;
  // Throws Error, before weights are read, if it cannot be; else set_batch_invariant(true).
  bool batch_invariant = false;
  // Throws Error, before weights are read, for a model that the caller has no use for; null: takes
  // all. The tokenizer is null where it is not read.
  std::function<void(const ModelConfig&, const Tokenizer*)> accept = {};
  // false: a tokenizer of a kind that is not built becomes a warning and the null tokenizer.
  bool tokenizer_required = true;
  Agreement* agreement = nullptr;  // ranks that load together each verify a share; null: one rank
};

struct LoadedModel {
  int64_t iteration = 0;
  std::filesystem::path directory;    // the checkpoint that was read
  std::vector<std::string> warnings;  // damaged checkpoints that were skipped
  ModelConfig config;
  TemplateSource chat_templates;     // the tokenizer's; empty: none
  std::vector<int32_t> end_of_text;  // ids from its generation_config.json or config.json
  // What the text of an encoder-decoder begins with, from there
  std::optional<int32_t> decoder_start;
  at::ScalarType dtype = at::kFloat;  // of the weights
  // The Hugging Face family whose names PEFT has for its modules. Throws Error if there is none.
  const HfFamily& family() const;
  const HfFamily* stored_family = nullptr;  // of a folder of Hugging Face; null: ask family()
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Model> model;  // the store outlives it
  std::unique_ptr<ForwardParameterStore> store;
};

// Reads the newest usable checkpoint, of a pipeline's stage (groups.pp) the part that it computes
// (served_slice()). The checksum of every byte that is used is verified
// (for a Hugging Face folder, which has none, shapes and sizes). `groups` must outlive the result.
// Throws Error if there is no usable checkpoint, or if it has no configuration or not exactly the
// model's weights.
LoadedModel load_model(const LoadModelRequest& request, const ParallelGroups& groups);

// The model that load_model() makes on each of `tensor_ranks` ranks, without its weights: of a
// folder of Hugging Face config.json is enough if the request says the type. Throws Error as
// load_model().
struct DescribedModel {
  ModelConfig config;
  at::ScalarType dtype = at::kFloat;
};
DescribedModel describe_model(const LoadModelRequest& request, int64_t tensor_ranks);

// The part of the model that a pipeline's stage computes: the segment of a pattern whose `|` end as
// many as there are stages, an equal part of layers of one kind, or else what divides the weights
// that a token is multiplied with most evenly. Throws UsageError for more stages than layers.
StageSlice served_slice(const ModelConfig& config, int64_t stage, int64_t stages);

// Other weights of the same model, for ForwardParameterStore::exchange(): parameters of `model` in
// the order of Module::visit, then state, in host memory and in the types that `model` has. Throws
// Error if the source is of another configuration or does not have exactly the model's weights.
std::vector<at::Tensor> read_weights(const LoadModelRequest& request, Model& model);

// A model before its weights are loaded: their source, and the configuration of model and
// tokenizer.
struct StoredModel {
  Checkpoint checkpoint;
  ModelConfig config;  // vocabulary sizes: rows of the stored embedding
  TokenizerConfig tokenizer;
  std::vector<std::string> warnings;
  const HfFamily* family = nullptr;     // null: not a Hugging Face folder
  TokenizerTexts tokenizer_texts = {};  // set: the tokenizer's, which is in no folder
};
StoredModel open_model(const LoadModelRequest& request);

// The type of the model (models/model_table.h) that a checkpoint of ours or an open Hugging Face
// folder holds.
std::string stored_model_type(const Checkpoint& checkpoint);
// Throws Error unless it is `type`.
void check_model_type(const Checkpoint& checkpoint, const std::string& type);

}  // namespace megatron
