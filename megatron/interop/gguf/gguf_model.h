// A GGUF file as a model of a Hugging Face family: settings, tokenizer and chat template come out
// of its metadata, and its weights are read as a checkpoint, dequantised.
#pragma once

#include <filesystem>
#include <string>

#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/import_weights.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct GgufModel {
  // Its checkpoint has also huggingface/config.json and huggingface/generation_config.json, as one
  // that was imported from such a folder (origin_files()).
  HfFolder folder;
  TokenizerTexts tokenizer;  // empty: the file has none
  // The message if its tokenizer is damaged or not built; `tokenizer` is then empty.
  std::string tokenizer_problem;
};

// Throws Error naming the key or the tensor for whatever is damaged, inconsistent or not built.
// Dequantises nothing.
GgufModel open_gguf(const std::filesystem::path& path);

// The flags of its tokenizer, as a checkpoint that holds its texts has them; the null tokenizer if
// it has none.
TokenizerConfig gguf_tokenizer(const GgufModel& model);

// As import_hf_folder(): writes <root>/iter_0000000 with the weights, its tokenizer and its
// configuration. Quantised weights become fp32. Throws Error also if its tokenizer is not built.
ConvertResult import_gguf(const std::filesystem::path& path, const std::filesystem::path& root,
                          const ConvertProgress& progress = {},
                          const std::filesystem::path& adapter = {});

}  // namespace megatron
