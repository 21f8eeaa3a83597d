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
  // Of position_embedding_type relative (transformer/attention/relative_positions.h)
  int64_t relative_attention_num_buckets = 32;
  int64_t relative_attention_max_distance = 128;
  // Those of Hugging Face have none, and scale the decoder's output before a tied output layer
  bool t5_output_bias = true;
  bool t5_scale_output = false;
  bool t5_encoder_only = false;  // num_layers are the encoder's, decoder_num_layers is 0
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// The configurations of both stacks, which count their own layers; of an encoder alone the decoder
// has none.
struct T5Stacks {
  TransformerConfig encoder, decoder;
};

struct RelativeBuckets;
// How the self-attention of one stack counts distances.
RelativeBuckets relative_buckets(const ModelConfig& config, bool decoder);

// Throws Error when the stacks are not the row of layers.
T5Stacks t5_stacks(const ModelConfig& config);

}  // namespace megatron
