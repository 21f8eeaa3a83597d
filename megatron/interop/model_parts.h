// A model that reads media, put together of pretrained parts: a language model, and encoders of
// images and of sounds. What no part has begins at random, such as projectors.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/model_table.h"

namespace megatron {

struct PartsRequest {
  // Of a GPT, or of a whole model of the run's type, of which encoders that are named below and
  // their projectors are left out; none: the language model begins at random
  std::optional<Checkpoint> language;
  std::filesystem::path vision, audio;  // folders of Hugging Face (hf_encoders.h); empty: none
};

struct ModelParts {
  Checkpoint language;               // by the names of the whole model
  std::vector<Checkpoint> encoders;  // the same
  std::vector<std::string> random;   // patterns of the parameters that no part has
  std::vector<std::string> notes;    // lines for the log
};

// At most so many rows may tables of the vocabulary lack: tokens that were added for media.
inline constexpr int64_t kMostAddedTokens = 1024;

// For a model of this configuration. Reads headers alone. Rows that tables of the vocabulary lack
// begin at zero. Throws Error naming the folder and each tensor that does not fit.
ModelParts join_parts(const PartsRequest& request, const ModelConfig& config);

}  // namespace megatron
