// A sample for people: its text, with media as "[image 480x640 -> 2340 tokens]", and what counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/fused_tokens.h"
#include "megatron/datasets/multimodal/media_tokens.h"

namespace megatron {

struct SampleText {
  std::string text;
  std::vector<std::string> counted;  // what is trained on, piece by piece
  int64_t tokens = 0;                // rows of media included
  int64_t counted_tokens = 0;
};

SampleText sample_text(const EncodedSample& sample, const std::vector<MediumFacts>& media,
                       const Tokenizer& tokenizer);

}  // namespace megatron
