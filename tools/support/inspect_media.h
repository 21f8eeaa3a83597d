// Rows of text with media as inspect-dataset shows them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct InspectMediaConfig : Config {
  std::string media_model, audio_media_model;
  std::string media_root;
  std::string save_media;
  std::string chat_template;
  bool escape_modality_text = false;

  void fields(FieldVisitor& v) override;
  void validate(Violations& violations) const override;
};

// Prints counts of all rows of the files, or one row, 0 being the first, and writes what the model
// sees of it as PNG files. Throws Error.
void inspect_media(const InspectMediaConfig& config, const TokenizerConfig& tokenizer,
                   const std::vector<std::string>& paths, std::optional<int64_t> sample, bool json);

}  // namespace megatron
