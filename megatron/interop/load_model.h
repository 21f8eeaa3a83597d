// A model, its weights and its tokenizer from a checkpoint or a folder of Hugging Face, for
// inference and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/agreement.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct HfFamily;
struct ParallelGroups;

struct LoadModelRequest {
  // A folder of checkpoints, one checkpoint, a folder of Hugging Face, or either of Megatron-LM's
  // torch_dist format.
  std::filesystem::path load;
  std::filesystem::path adapter;     // a folder of PEFT with adapters for that model; empty: none
  std::optional<int64_t> ckpt_step;  // this iteration and no other
  std::optional<at::ScalarType> dtype;  // default: as stored
  at::Device device = at::kCPU;
  // false: a tokenizer that cannot be made (a kind that is not built) becomes a warning and the
  // null tokenizer.
  bool tokenizer_required = true;
  Agreement* agreement = nullptr;  // ranks that load together verify a share each; null: one rank
};

struct LoadedModel {
  int64_t iteration = 0;
  std::filesystem::path directory;    // the checkpoint that was read
  std::vector<std::string> warnings;  // damaged checkpoints that were passed over
  GPTConfig config;
  std::filesystem::path tokenizer_folder;  // its stored files and chat template; empty: none
  std::vector<int32_t> end_of_text;        // ids by its generation_config.json or config.json
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<GPTModel> model;  // outlived by the store
  std::unique_ptr<PlainParameterStore> store;
};

// Reads the newest usable checkpoint. Every byte that is used has been verified (a folder of
// Hugging Face has no checksums; its shapes and sizes are). `groups` must outlive the result.
// Throws Error when there is none, or when it holds no configuration or not exactly the model's
// weights.
LoadedModel load_model(const LoadModelRequest& request, const ParallelGroups& groups);

// A model before its weights: what to load them from, its configuration and its tokenizer's.
struct StoredModel {
  Checkpoint checkpoint;
  GPTConfig config;  // its vocabulary is the rows of the embedding as stored
  TokenizerConfig tokenizer;
  std::vector<std::string> warnings;
  const HfFamily* family = nullptr;  // of a folder of Hugging Face
};
StoredModel open_model(const LoadModelRequest& request);

}  // namespace megatron
