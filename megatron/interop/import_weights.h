// What all imports share: foreign tensors that were opened as a checkpoint become one of ours, one
// tensor at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct ConvertResult {
  std::filesystem::path directory;  // what was written: the checkpoint, or the folder
  std::string model_type;
  int64_t iteration = 0;            // of our checkpoint
  uint64_t bytes = 0;               // of tensors
  int64_t num_tensors = 0;          // in the foreign files
  std::vector<std::string> files;   // written, relative to `directory`
  std::vector<std::string> waived;  // tensors of the source that hold no weights
  std::vector<std::string> warnings;
};

// Called with the total before the first tensor (bytes 0) and with the bytes of each tensor that is
// done.
using ConvertProgress = std::function<void(uint64_t total_bytes, uint64_t bytes)>;

uint64_t num_bytes(DType dtype, const std::vector<int64_t>& shape);

// Reads one tensor of a checkpoint, or parts of it, into `tensor.data`.
void load_one(const Checkpoint& checkpoint, const ShardedTensor& tensor);

// (relative name, contents)
using StoredFiles = std::vector<std::pair<std::string, std::string>>;

// The tokenizer that flags name for a model of another program.
struct ImportedTokenizer {
  TokenizerConfig config;             // paths are those of the checkpoint's own copies
  std::optional<int64_t> vocab_size;  // that of the model, when it is known
  StoredFiles files;                  // tokenizer/...
};
// An empty type: none is known; config.yaml gets the null tokenizer of the model's vocabulary.
ImportedTokenizer import_tokenizer(const TokenizerConfig& config);

// The text of config.yaml.
std::string model_yaml(const TransformerConfig& transformer, const TokenizerConfig& tokenizer);

struct ImportRequest {
  std::filesystem::path root;  // where iter_* is written
  int64_t iteration = 0;
  std::vector<const Checkpoint*> sources;  // no tensor is in two of them
  StoredFiles files;
};

// Throws Error when the root holds checkpoints.
void check_no_checkpoints(const std::filesystem::path& root);

// Writes <root>/iter_* with the tensors of the sources, in their element types. Adds directory,
// iteration, bytes, files and warnings to `result`. Memory: the largest tensor, twice at most.
void import_weights(const ImportRequest& request, const ConvertProgress& progress,
                    ConvertResult& result);

// A model in files of another program, described as a checkpoint of ours.
struct ForeignModel {
  GPTConfig config;
  Checkpoint checkpoint;            // tensors by our names
  int64_t num_tensors = 0;          // of theirs that are used
  std::vector<std::string> waived;  // what of theirs holds no weights, or is left out by name
};

// Opens a model for the vocabulary of the tokenizer (none: that of its tensors) and writes it, its
// configuration and the tokenizer's files to <root>/iter_*, of the model's iteration. Element types
// stay. Memory: the largest tensor, twice at most.
ConvertResult import_model(
    const std::filesystem::path& root, const TokenizerConfig& tokenizer,
    const std::function<ForeignModel(std::optional<int64_t> vocab_size)>& open,
    const ConvertProgress& progress);

}  // namespace megatron
