// What a GPT that reads neighbours of its chunks has besides its layers.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct ModelConfig;

struct RetroConfig : Config {
  int64_t retro_chunk_length = 64;    // m; what is retrieved of a neighbour has 2 m tokens
  std::vector<int64_t> retro_layers;  // that read neighbours, from 1; empty: as layers() says
  int64_t retro_encoder_num_layers = 2;
  int64_t retro_num_neighbors = 2;  // of each chunk
  double retro_encoder_hidden_dropout = 0.1;
  double retro_encoder_attention_dropout = 0.1;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  int64_t retrieved_length() const { return 2 * retro_chunk_length; }
  // The layers that read neighbours, from 1, ascending: those given, or the 6th (of more than 15
  // layers the 9th) and every third after it.
  std::vector<int64_t> layers(int64_t num_layers) const;
};

// The configurations of both stacks. The encoder counts its own layers.
struct RetroStacks {
  TransformerConfig decoder, encoder;
  int64_t first = 0, last = 0;  // retro layers, from 1
};

// Throws Error when no layer reads neighbours.
RetroStacks retro_stacks(const ModelConfig& config);

// Multiply-adds for one token beyond those of a GPT: cross attention of retro layers, and the
// encoder, which reads 2 k tokens of neighbours for each token.
double retrieval_products(const ModelConfig& config);

}  // namespace megatron
