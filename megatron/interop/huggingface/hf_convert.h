// Conversion between Hugging Face folders and our checkpoints, both ways, one tensor at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/import_weights.h"

namespace megatron {

// Writes <root>/iter_0000000 with the weights of an open folder, its configuration as config.yaml,
// its tokenizer's files and its own config.json and generation_config.json. Element types are kept.
// Memory: at most twice the largest tensor. Throws Error for whatever open_hf_folder refuses, and
// if the root holds checkpoints.
//
// With `adapter`, a PEFT folder for that model, the checkpoint also holds its adapters, and
// config.yaml their settings.
ConvertResult import_hf_folder(const std::filesystem::path& folder,
                               const std::filesystem::path& root,
                               const ConvertProgress& progress = {},
                               const std::filesystem::path& adapter = {});

// The same for an open model, whose tokenizer has these flags and files.
struct HfImport {
  HfFolder source;
  TokenizerConfig tokenizer;    // paths are those of the checkpoint's own copies
  StoredFiles tokenizer_files;  // tokenizer/...
};
ConvertResult import_hf_model(HfImport model, const std::filesystem::path& root,
                              const ConvertProgress& progress,
                              const std::filesystem::path& adapter);

struct ExportRequest {
  std::filesystem::path load;  // a folder of checkpoints, or one checkpoint
  std::optional<int64_t> ckpt_step;
  std::filesystem::path folder;  // created; must be empty if it exists
  // Empty: that of the checkpoint's origin, else the first family that can express the model.
  std::string model_type;
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
  // For a checkpoint with adapters: writes the model with adapters merged into the weights, instead
  // of the adapters only, in PEFT's format.
  bool merge_adapter = false;
};

// Writes safetensors (with an index if there are several), config.json as transformers 5 does, and
// the tokenizer's files and generation_config.json if the checkpoint holds them. config.json is
// written last, so that an unfinished folder is not taken for a model. Element types are kept, but
// values that a run keeps in fp32 beside narrower ones (Parameter::keeps_fp32) are rounded to the
// type of the others, which is theirs in transformers;
// optimizer state is not exported. Throws Error naming a setting or tensor that the family cannot
// express, and for tensors of the checkpoint that the model does not have. A checkpoint with
// adapters becomes a PEFT folder, without tokenizer, unless they are merged.
ConvertResult export_hf_folder(const ExportRequest& request, const ConvertProgress& progress = {});

}  // namespace megatron
