// Common part of all imports: foreign tensors, opened as a checkpoint, are written as one of ours,
// one tensor at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/model.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct ConvertResult {
  std::filesystem::path directory;  // the checkpoint or folder that was written
  std::string model_type;
  int64_t iteration = 0;            // iteration of our checkpoint
  uint64_t bytes = 0;               // total of the tensors
  int64_t num_tensors = 0;          // tensors in the foreign files
  std::vector<std::string> files;   // written, relative to `directory`
  std::vector<std::string> waived;  // tensors of the source without weights
  std::vector<std::string> warnings;
};

// Called before the first tensor with the total and bytes 0, then after each tensor with its bytes.
using ConvertProgress = std::function<void(uint64_t total_bytes, uint64_t bytes)>;

uint64_t num_bytes(DType dtype, const std::vector<int64_t>& shape);

// Reads one tensor of a checkpoint, or a part of one, into `tensor.data`.
void load_one(const Checkpoint& checkpoint, const ShardedTensor& tensor);

// (relative name, contents)
using StoredFiles = std::vector<std::pair<std::string, std::string>>;

// The tokenizer given by flags for an imported model.
struct ImportedTokenizer {
  TokenizerConfig config;             // paths are those of the checkpoint's own copies
  std::optional<int64_t> vocab_size;  // the model's, if known
  StoredFiles files;                  // tokenizer/...
};
// If the type is empty, config.yaml gets the null tokenizer of the model's vocabulary.
ImportedTokenizer import_tokenizer(const TokenizerConfig& config);

// The text of config.yaml.
std::string model_yaml(const ModelConfig& model, const TokenizerConfig& tokenizer);

// What config.yaml of a checkpoint of ours says, which is verified. Vocabulary sizes: rows of the
// stored embedding; 0: there is none. Throws Error if there is no config.yaml.
struct StoredConfig {
  ModelConfig model;
  TokenizerConfig tokenizer;
};
StoredConfig read_stored_config(const Checkpoint& checkpoint);

inline constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";
// Its name in a model of this type.
std::string word_embeddings_of(std::string_view model_type);

struct ImportRequest {
  std::filesystem::path root;  // where iter_* is written
  int64_t iteration = 0;
  std::vector<const Checkpoint*> sources;  // of tensors in several the last one's is taken
  std::set<std::string> left_out = {};     // tensors that are not taken
  StoredFiles files;
};

// Throws Error if the root holds checkpoints.
void check_no_checkpoints(const std::filesystem::path& root);

// Writes <root>/iter_* with the tensors of the sources, in their element types. Adds directory,
// iteration, bytes, files and warnings to `result`. Memory: at most twice the largest tensor.
void import_weights(const ImportRequest& request, const ConvertProgress& progress,
                    ConvertResult& result);

// A model in another program's files, described as a checkpoint of ours.
struct ForeignModel {
  ModelConfig config;
  Checkpoint checkpoint;            // tensors by our names
  int64_t num_tensors = 0;          // foreign tensors that are used
  std::vector<std::string> waived;  // foreign tensors without weights, or left out by name
};

// Opens a model for the tokenizer's vocabulary (none: that of its tensors) and writes it, its
// configuration and the tokenizer's files to <root>/iter_<iteration of the model>. Element types
// are kept. Memory: at most twice the largest tensor.
ConvertResult import_model(
    const std::filesystem::path& root, const TokenizerConfig& tokenizer,
    const std::function<ForeignModel(std::optional<int64_t> vocab_size)>& open,
    const ConvertProgress& progress);

}  // namespace megatron
