// Conversion between folders of Hugging Face and our checkpoints, both ways, one tensor at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "megatron/interop/import_weights.h"

namespace megatron {

// Writes <root>/iter_0000000 with the weights of an open folder, its configuration as config.yaml,
// its tokenizer's files and its own config.json and generation_config.json. Element types stay.
// Memory: the largest tensor, twice at most. Throws Error for whatever open_hf_folder refuses, and
// when the root holds checkpoints.
//
// With `adapter`, a folder of PEFT for that model, the checkpoint holds its adapters beside the
// weights and its settings in config.yaml.
ConvertResult import_hf_folder(const std::filesystem::path& folder,
                               const std::filesystem::path& root,
                               const ConvertProgress& progress = {},
                               const std::filesystem::path& adapter = {});

struct ExportRequest {
  std::filesystem::path load;  // a folder of checkpoints, or one checkpoint
  std::optional<int64_t> ckpt_step;
  std::filesystem::path folder;  // created; must not hold anything
  std::string model_type;  // empty: that of the checkpoint's origin, else the first family that can
                           // be this model
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
  // Of a checkpoint with adapters: adds them to the weights and writes the model, in place of the
  // adapters alone in the format of PEFT.
  bool merge_adapter = false;
};

// Writes safetensors (with an index where there are several), config.json in the newer dialect, the
// tokenizer's files and generation_config.json when the checkpoint holds them. config.json comes
// last, so that an unfinished folder is not taken for a model. Element types stay; the optimizer's
// state is left aside. Throws Error naming a setting or tensor that the family cannot express, and
// for tensors of the checkpoint that are not of the model. A checkpoint with adapters becomes a
// folder of PEFT, without tokenizer, unless they are merged.
ConvertResult export_hf_folder(const ExportRequest& request, const ConvertProgress& progress = {});

}  // namespace megatron
