// A Hugging Face folder (config.json, safetensors in one file or several with an index, tokenizer
// files) read as a checkpoint: its manifest is derived from the family's table of names, so that it
// loads through the same code as checkpoints, and each rank reads only what it needs.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/interop/import_weights.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Whether the folder holds a config.json and no checkpoints of ours. The file is not validated.
bool is_hf_folder(const std::filesystem::path& folder);

struct HfFolder {
  HfModel model;
  Checkpoint checkpoint;             // tensors by our names; iteration 0
  std::vector<std::string> tensors;  // Hugging Face names that are used, each exactly once
  // Names of tensors without weights: masks, frequencies, a copy of a tied table
  std::vector<std::string> waived;
  // Those that the model does not compute with and an export writes back
  std::vector<std::string> carried;
  // Beginnings of names in these files: {in the files, in the table} (HfFamily::beginnings)
  std::vector<std::pair<std::string_view, std::string_view>> beginnings;
};

// Reads the configuration and the headers of the files, and accounts for every tensor: each is used
// exactly once, or waived by name. Throws Error naming tensors that are missing, left over, of
// another shape or type, truncated, or untied although the configuration ties them (or the
// reverse), and stored rotary frequencies that are not those of the configuration.
HfFolder open_hf_folder(const std::filesystem::path& folder);

// Weights of such a model in other files, under the names of Hugging Face.
struct HfSource {
  std::string name;  // of the files, for messages
  HfModel model;
  TensorFiles files;
  std::string described_by = "config.json";  // what the model's shape is taken from
  bool transposes =
      true;  // false: no weight is stored transposed, whatever the family's table says
  std::set<std::string> straight = {};     // the same of some tensors
  std::vector<std::string> problems = {};  // found already
  // The name of a tensor in the files, for messages; empty: the same.
  std::function<std::string(const std::string& name)> shown = {};
  // Texts that the checkpoint has under these names.
  StoredFiles texts = {};
};
HfFolder open_hf_source(HfSource source);

// Reads config.json, and of the files, if there are any, whether they hold the layers of
// multi-token prediction that it names: transformers writes files without.
HfModel read_hf_config(const std::filesystem::path& folder);

// Flags for the folder's tokenizer, with paths in the folder. Without tokenizer files: the null
// tokenizer of `vocab_size` ids.
TokenizerConfig hf_tokenizer(const std::filesystem::path& folder, int64_t vocab_size);

// Names of the tokenizer's files and of generation_config.json, those that the folder holds.
std::vector<std::string> hf_tokenizer_files(const std::filesystem::path& folder);
// The files of an imported model, as files of a checkpoint: huggingface/config.json,
// huggingface/generation_config.json and, of families with tensors that are carried,
// huggingface/carried.safetensors of the Hugging Face folder, and peft/adapter_config.json
// of its adapters. `source`: an open folder, or a checkpoint of ours that holds them. Every
// checkpoint of a run holds those of the model it started from, so that an export writes the same
// family.
StoredFiles origin_files(const Checkpoint& source);
inline constexpr const char* kKeptHfConfig = "huggingface/config.json";
inline constexpr const char* kKeptHfGenerationConfig = "huggingface/generation_config.json";
// The tensors that are carried, under their names in the folder; the metadata's "beginnings": a
// JSON list of HfFolder::beginnings.
inline constexpr const char* kKeptHfTensors = "huggingface/carried.safetensors";
inline constexpr const char* kKeptPeftConfig = "peft/adapter_config.json";

// eos_token_id (one or several) of generation_config.json, else of config.json, of such a source;
// empty: in neither. Throws Error where it is not an id.
std::vector<int32_t> end_of_text_ids(const Checkpoint& source);
// decoder_start_token_id of these files: what the text of an encoder-decoder begins with; none: in
// neither.
std::optional<int32_t> decoder_start_id(const Checkpoint& source);

inline constexpr const char* kHfConfig = "config.json";
inline constexpr const char* kHfGenerationConfig = "generation_config.json";

}  // namespace megatron
