// The sizes of the two stacks of a T5.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct ModelConfig;

// The layers of both stacks are one row, first those of the encoder: num_layers counts them all.
// seq_length is that of the encoder.
struct T5Config : Config {
  int64_t encoder_num_layers = 0;             // 0: given by num_layers
  int64_t decoder_num_layers = 0;             // 0: as many as the encoder has
  std::optional<int64_t> encoder_seq_length;  // another name of seq_length
  int64_t decoder_seq_length = 0;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// The configurations of both stacks, which count their own layers.
struct T5Stacks {
  TransformerConfig encoder, decoder;
};

// Throws Error when the stacks are not the row of layers.
T5Stacks t5_stacks(const ModelConfig& config);

}  // namespace megatron
