// What the layers and the ends of a T5 cost a rank. Letters as in models/common/ends_cost.h; T and
// R are the encoder's tokens and rows, T' and R' the decoder's, of as many samples.
//
// The head is that of a language model with T' and R'. Saved besides:
//   embedding      8 (T + T')        token ids of both sides
//   between        R h x + 4 k R     input and statistics of the encoder's norm
//                  R h e             its output, which every decoder layer reads
// While the decoder runs backward, R h e of the gradient of that output.
#include "megatron/models/model.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {
namespace {

constexpr int64_t kColumnIdBytes = 8;  // of a token id or a label

// The decoder's tokens for each of the encoder's.
double decoder_share(const T5Stacks& stacks) {
  return static_cast<double>(stacks.decoder.seq_length) /
         static_cast<double>(stacks.encoder.seq_length);
}

LayerShape decoder_shape(const T5Stacks& stacks, const LayerShape& encoder) {
  LayerShape shape = encoder;
  shape.encoded = encoder.tokens;
  shape.tokens = encoder.tokens * stacks.decoder.seq_length / stacks.encoder.seq_length;
  shape.rows = shape.tokens / (encoder.tokens / encoder.rows);
  shape.documents = true;  // the text and its padding
  shape.document_rows = false;
  return shape;
}

int64_t encoded_bytes(const T5Stacks& stacks, const LayerShape& shape) {
  return shape.rows * stacks.encoder.hidden_size * shape.element;
}

}  // namespace

LayerCost t5_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                        bool offloaded) {
  const T5Stacks stacks = t5_stacks(config);
  if (layer_number <= stacks.encoder.num_layers) {
    LayerCost cost = layer_cost(stacks.encoder, layer_number, shape, offloaded);
    cost.first.kept = {};  // it reads a whole sequence at once
    return cost;
  }
  LayerCost cost = layer_cost(stacks.decoder, layer_number - stacks.encoder.num_layers,
                              decoder_shape(stacks, shape), offloaded);
  for (SublayerCost* half : {&cost.first, &cost.second}) {
    half->count_per_token_of(decoder_share(stacks));
    half->backward_peak += encoded_bytes(stacks, shape);
  }
  // Keys and values of cross attention, and how many there are
  const TransformerConfig& t = stacks.encoder;
  cost.first.kept.sequence += 2 * t.seq_length * t.attention_width() / shape.tensor * shape.element;
  cost.first.kept.sequence += static_cast<int64_t>(sizeof(int64_t));
  return cost;
}

EndsCost t5_ends_cost(const ModelConfig& config, const EndsShape& shape) {
  const T5Stacks stacks = t5_stacks(config);
  const StreamCost encoder(stacks.encoder, shape.layer);
  EndsShape of_decoder = shape;
  of_decoder.layer = decoder_shape(stacks, shape.layer);
  const EndCost embedding = language_ends_cost(config, shape).embedding;
  EndsCost cost = language_ends_cost(config, of_decoder);
  cost.embedding.saved += embedding.saved;
  cost.first_stack = stacks.encoder.num_layers;
  cost.passed_on = encoded_bytes(stacks, shape.layer);
  cost.between_stacks = encoder.stream + encoder.stats + cost.passed_on;
  cost.embedding.tensor += embedding.tensor;
  cost.head_products *= decoder_share(stacks);
  // Texts and masks; labels and loss mask; whether the text was cut
  cost.batch = (kColumnIdBytes + 1) * shape.layer.tokens +
               (2 * kColumnIdBytes + 4 + 1) * of_decoder.layer.tokens +
               kColumnIdBytes * shape.layer.samples;
  return cost;
}

}  // namespace megatron
