// Conversion between Megatron-LM's `torch_dist` checkpoints and ours, both ways, one tensor at a
// time.
#pragma once

#include <filesystem>

#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct TorchDistImport {
  std::filesystem::path directory;  // one checkpoint (find_torch_dist)
  std::filesystem::path root;       // where iter_* is written
  TransformerConfig transformer;    // read_torch_dist_arguments, overridden by the user's flags
  TokenizerConfig tokenizer;        // empty type: unknown; the null tokenizer
};

// Writes <root>/iter_* of the same iteration with the weights, the configuration and the
// tokenizer's files. Element types are kept; optimizer state is not imported. Memory: at most twice
// the largest tensor.
ConvertResult import_torch_dist(const TorchDistImport& request,
                                const ConvertProgress& progress = {});

// Writes a checkpoint of ours, or a Hugging Face folder, as <request.folder>/iter_*, with
// latest_checkpointed_iteration.txt next to it, as Megatron-LM on one rank without an optimizer
// does; Megatron-LM loads it under any layout. request.model_type and max_shard_bytes are ignored.
// Throws Error naming a setting that Megatron-LM does not have.
ConvertResult export_torch_dist(const ExportRequest& request, const ConvertProgress& progress = {});

}  // namespace megatron
