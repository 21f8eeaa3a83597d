// What families of models that read media beside text have in common: a language model as a part of
// them. Defined in hf_multimodal_families.cc.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

#include "megatron/interop/huggingface/detail/hf_common.h"
#include "megatron/models/vision/vision_config.h"

namespace megatron::hf {

// Rows of a language model as a part: ours in language_model., theirs in `prefix`.
std::vector<HfRow> nested_rows(std::initializer_list<std::span<const HfRow>> all,
                               std::string_view prefix = "language_model.");

// What transformers takes for keys that a text_config leaves out.
struct TextDefaults {
  std::string_view type;
  int64_t hidden, ffn, layers, heads, vocabulary;
  // Writes others that `given` lacks to `full`; null: there are none
  void (*more)(HfFields& given, HfFields& full) = nullptr;
};

// The language models that a family has; the first is that of a text_config without a type.
using TextTypes = std::span<const TextDefaults>;

// text_config. The whole model says whether the output layer is tied, if it says so.
void text_fields(HfFields& f, ModelConfig& c, const char* missing_type, TextTypes types);

void activation_field(HfFields& f, std::string_view key, VisionActivation& value,
                      const char* missing);

}  // namespace megatron::hf
