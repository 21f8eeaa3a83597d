// The architectures of GGUF files ("llama", "qwen2", ...) that are families of Hugging Face here:
// for each a table of tensor names and the meaning of its settings.
//
// A new one is a row of the table in gguf_architectures.cc, its names, and its settings.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "megatron/interop/gguf/gguf_settings.h"

namespace megatron {

// How a tensor differs from the one of Hugging Face.
enum class GgufForm {
  kSame,
  // Rows of queries (keys) are in neighbouring pairs for rotary positions instead of halves.
  kPairedQueries,
  kPairedKeys,
  kJoinedByPart,  // rows are [all queries | all keys | all values] instead of by head
  kFromOne,       // norm weights have 1 added
  kOneRow,        // a vector that is a matrix of one row there
  // Of latent attention, by head: what makes keys of a latent, transposed, and what makes values.
  // Together they are one matrix there, of each head [keys | values].
  kLatentKeys,
  kLatentValues,
};

// Names without ".weight" and ".bias"; with one where theirs has neither. '*' stands for an index:
// the layer, then the expert. With one '*' more in theirs: all experts of a layer in one tensor.
struct GgufName {
  std::string_view name;  // in the file
  std::string_view theirs;
  GgufForm form = GgufForm::kSame;
};

struct GgufArchitecture {
  std::string_view name;        // general.architecture
  bool experts = false;         // expert_count is above 0
  int64_t gating = 0;           // expert_gating_func, where families differ in it; 0: any
  std::string_view model_type;  // of config.json
  std::vector<std::span<const GgufName>> names;
  // Writes all keys of config.json except model_type and those of special tokens.
  void (*settings)(GgufSettings& s);
  bool merges_by_id = false;          // its pieces of SentencePiece merge by their ids
  bool strips_after_control = false;  // its tokenizer drops white space after control tokens
};

// Null: not built.
const GgufArchitecture* find_gguf_architecture(std::string_view name, bool experts,
                                               int64_t gating = 0);
// "llama, qwen2, ..."
std::string gguf_architecture_names();

}  // namespace megatron
