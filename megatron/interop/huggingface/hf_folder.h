// A folder of Hugging Face (config.json, safetensors in one file or several with an index,
// tokenizer files) read as a checkpoint: its manifest is derived from the table of the family, so
// that whatever loads checkpoints loads it, and a rank reads what it needs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/interop/import_weights.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Whether it holds a config.json, and no checkpoints of ours. What is wrong with the file is said
// when it is read.
bool is_hf_folder(const std::filesystem::path& folder);

struct HfFolder {
  HfModel model;
  Checkpoint checkpoint;             // tensors by our names; iteration 0
  std::vector<std::string> tensors;  // names that are used, each exactly once
  std::vector<std::string>
      waived;  // names that hold no weights: masks, frequencies, a copy of a tied table
};

// Reads the configuration and the headers of the files, and accounts for every tensor: each is used
// exactly once, or waived by name. Throws Error naming what is missing, left over, of another shape
// or type, cut short, untied although the configuration ties it (or the reverse), or rotated in
// another way than the configuration says.
HfFolder open_hf_folder(const std::filesystem::path& folder);

// config.json alone.
HfModel read_hf_config(const std::filesystem::path& folder);

// The flags of its tokenizer; paths are those of the folder. Without files: the null tokenizer of
// `vocab_size` ids.
TokenizerConfig hf_tokenizer(const std::filesystem::path& folder, int64_t vocab_size);

// The names of the tokenizer's files that the folder holds, and of its generation_config.json.
std::vector<std::string> hf_tokenizer_files(const std::filesystem::path& folder);
// What a model brought along that our configuration has no place for, as files of a checkpoint:
// huggingface/config.json and huggingface/generation_config.json of the folder it came from, and
// peft/adapter_config.json of its adapters. `source`: an open folder, or a checkpoint of ours that
// holds them. Every checkpoint of a run holds those of what it started from, so that an export
// writes the same family.
StoredFiles origin_files(const Checkpoint& source);
inline constexpr const char* kKeptHfConfig = "huggingface/config.json";
inline constexpr const char* kKeptHfGenerationConfig = "huggingface/generation_config.json";
inline constexpr const char* kKeptPeftConfig = "peft/adapter_config.json";

// eos_token_id (one or several) of generation_config.json, else of config.json, of such a source;
// empty: neither says any.
std::vector<int32_t> end_of_text_ids(const Checkpoint& source);

inline constexpr const char* kHfConfig = "config.json";
inline constexpr const char* kHfGenerationConfig = "generation_config.json";

}  // namespace megatron
