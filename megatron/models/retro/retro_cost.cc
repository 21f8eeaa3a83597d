// What the layers and the ends of a Retro cost a rank. Letters as in models/common/ends_cost.h, K
// the neighbours of a chunk, of m tokens each; T' = 2 K T tokens of neighbours on a rank, R' their
// rows.
//
// A layer that reads neighbours has cross attention of T queries over T' rows: l b sequences of m
// queries. The first one has the encoder before it: K l b sequences of 2 m tokens, whose first
// layer reads the stream. Saved there besides what these layers save:
//   z              R (2 h e + h x + 4 k)   the norm's output, its statistics, rows of chunks
//   neighbours     R' h x + 8 T'           their embeddings and ids
// With --recompute-modules retro_encoder of the encoder's layers only their inputs, R' h x each.
// From that layer to the last one that reads them R' h e of encoded neighbours is held, and in the
// backward as much of their gradient.
#include <algorithm>
#include <utility>
#include <vector>

#include "megatron/models/model.h"
#include "megatron/models/retro/retro_model.h"
#include "megatron/transformer/attention/cross_attention_cost.h"
#include "megatron/transformer/layer_kinds.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

constexpr int64_t kIdBytes = 8;

struct RetroSizes {
  RetroSizes(const ModelConfig& config, const LayerShape& shape)
      : own(config.own.as_or_default<RetroConfig>()),
        stacks(retro_stacks(config)),
        m(own.retro_chunk_length),
        k(own.retro_num_neighbors),
        // chunks of all samples; a plan of one token has less than one
        chunks(std::max<int64_t>(1, shape.tokens / m)),
        tokens(2 * k * shape.tokens),
        rows(2 * k * shape.rows) {}

  const RetroConfig own;
  const RetroStacks stacks;
  const int64_t m, k, chunks;
  const int64_t tokens, rows;  // of neighbours

  bool reads(int64_t layer_number) const {
    return stacks.decoder.layer_letters(layer_number).find('r') != std::string_view::npos;
  }
  int64_t encoded_bytes(const LayerShape& shape) const {
    return rows * stacks.decoder.hidden_size * shape.element;
  }
};

// Cross attention of sequences of `length` queries, `shape.tokens` in all, over `encoded` rows.
SublayerCost cross_of(const TransformerConfig& stack, int64_t layer_number, LayerShape shape,
                      int64_t length, int64_t encoded) {
  TransformerConfig config = stack;
  config.seq_length = length;
  shape.samples = std::max<int64_t>(1, shape.tokens / length);
  shape.encoded = encoded;
  return cross_attention_cost(config, layer_number, shape, /*offloaded=*/false);
}

SublayerCost both_halves(LayerCost layer) {
  layer.first.append(layer.second, layer.stream);
  return layer.first;
}

// With --recompute-modules retro_encoder: of a layer of the encoder only its input is saved.
SublayerCost recomputed_alone(SublayerCost layer, int64_t stream) {
  const int64_t again = layer.saved.total() - stream;
  layer.backward_peak = std::max(layer.forward_peak, again + layer.backward_peak);
  layer.backward_end += again;
  layer.forward_peak = stream + layer.unrecorded_peak;
  layer.forward_end = stream;
  layer.saved = {};
  layer.saved.residual = stream;
  layer.recomputed_products = layer.weight_products() + layer.score_products;
  layer.tensor.backward += layer.tensor.forward;
  return layer;
}

LayerShape retrieved_shape(const RetroSizes& sizes, const LayerShape& shape) {
  LayerShape retrieved = shape;
  retrieved.samples = sizes.k * sizes.chunks;
  retrieved.tokens = sizes.tokens;
  retrieved.rows = sizes.rows;
  retrieved.padded = false;
  return retrieved;
}

// The encoder's layers, each per token of its own.
std::vector<LayerCost> encoder_layers(const RetroSizes& sizes, const LayerShape& shape) {
  const TransformerConfig& stack = sizes.stacks.encoder;
  const LayerShape retrieved = retrieved_shape(sizes, shape);
  const int64_t number = sizes.stacks.decoder.num_layers + 1;
  std::vector<LayerCost> layers;
  for (int64_t i = 0; i < stack.num_layers; ++i) {
    LayerCost layer = transformer_layer_cost(stack, number + i, retrieved, /*offloaded=*/false);
    if (i == 0)
      layer.first.append(cross_of(stack, number, retrieved, 2 * sizes.m * sizes.k, shape.tokens),
                         layer.stream);
    layers.push_back(layer);
  }
  return layers;
}

// Saved around the encoder: z, and embeddings and ids of neighbours.
SavedBytes saved_around(const RetroSizes& sizes, const LayerShape& shape) {
  const StreamCost around(sizes.stacks.decoder, shape);
  SavedBytes saved;
  saved.norms =
      2 * around.normed + around.stats + (shape.residual == shape.element ? 0 : around.stream);
  saved.ends = kIdBytes * sizes.tokens;
  return saved;
}

SublayerCost encoder_cost(const RetroSizes& sizes, const LayerShape& shape) {
  const TransformerConfig& stack = sizes.stacks.encoder;
  const LayerShape retrieved = retrieved_shape(sizes, shape);
  const std::vector<LayerCost> layers = encoder_layers(sizes, shape);
  const int64_t stream = sizes.rows * stack.hidden_size * shape.residual;
  const auto layer = [&](size_t i) {
    const bool again = sizes.stacks.decoder.recomputes("retro_encoder");
    return again ? recomputed_alone(both_halves(layers[i]), stream) : both_halves(layers[i]);
  };
  SublayerCost all = layer(0);
  for (size_t i = 1; i < layers.size(); ++i) all.append(layer(i), stream);
  all.count_per_token_of(static_cast<double>(2 * sizes.k));
  all.saved += saved_around(sizes, shape);
  // Embeddings of neighbours, and rows of chunks that sequence parallelism gathers and divides anew
  const auto h = static_cast<double>(stack.hidden_size);
  const double embedded =
      scatter_bytes(shape.tensor, static_cast<double>(sizes.tokens * shape.element) * h);
  all.tensor += shape.sequence_parallel ? Traffic{embedded, embedded} : Traffic{2 * embedded, 0};
  const double rows =
      scatter_bytes(shape.tensor, static_cast<double>(shape.tokens * shape.residual) * h);
  if (shape.sequence_parallel) all.tensor += {rows, rows};
  return all;
}

LayerCost::Part part_of(const LayerCost& layer) {
  return {layer.unrecorded_peak(), layer.saved().total(),
          layer.backward_peak(/*grad_is_held=*/true).most};
}

// What recomputation computes again one by one: self-attention, the encoder's layers, and cross
// attention with the MLP (first_retro_layer.cc). What comes to be held after a part ran is not yet
// there in its forward, and no more in its backward.
void divide_first_layer(const RetroSizes& sizes, const LayerShape& shape, LayerCost whole,
                        LayerCost& cost) {
  const int64_t encoded = sizes.rows * sizes.stacks.encoder.hidden_size * shape.residual;
  const std::vector<LayerCost> layers = encoder_layers(sizes, shape);
  int64_t around = saved_around(sizes, shape).total();
  if (!shape.sequence_parallel) around -= StreamCost(sizes.stacks.decoder, shape).normed;
  cost.held_for_parts = whole.stream + around + std::ssize(layers) * encoded;
  const auto add = [&](const LayerCost& layer, int64_t later) {
    cost.parts.push_back(part_of(layer));
    cost.parts.back().unrecorded_peak -= later;
    cost.parts.back().backward_peak -= later;
  };
  add(one_branch_cost(whole.first), around + std::ssize(layers) * encoded);
  for (size_t i = 0; i < layers.size(); ++i) {
    add(layers[i], (std::ssize(layers) - 1 - static_cast<int64_t>(i)) * encoded);
    LayerCost::Part& part = cost.parts.back();
    part.saved += whole.stream - encoded;          // its input is held between the passes
    part.backward_peak += whole.stream + encoded;  // gradients of z and of its output
  }
  LayerCost reading = whole;
  reading.first = cross_of(sizes.stacks.decoder, sizes.stacks.first, shape, sizes.m, sizes.tokens);
  add(reading, 0);
  cost.parts.back().backward_peak += sizes.encoded_bytes(shape);
}

}  // namespace

LayerCost retro_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                           bool offloaded) {
  const RetroSizes sizes(config, shape);
  const TransformerConfig& stack = sizes.stacks.decoder;
  LayerCost cost = transformer_layer_cost(stack, layer_number, shape, offloaded);
  if (layer_number == sizes.stacks.first) {
    divide_first_layer(sizes, shape, cost, cost);
    cost.first.append(encoder_cost(sizes, shape), cost.stream);
  }
  if (sizes.reads(layer_number))
    cost.first.append(cross_of(stack, layer_number, shape, sizes.m, sizes.tokens), cost.stream);
  if (layer_number >= sizes.stacks.first && layer_number <= sizes.stacks.last)
    for (SublayerCost* half : {&cost.first, &cost.second})
      half->backward_peak += sizes.encoded_bytes(shape);
  return cost;
}

EndsCost retro_ends_cost(const ModelConfig& config, const EndsShape& shape) {
  const RetroSizes sizes(config, shape.layer);
  EndsCost cost = language_ends_cost(config, shape);
  cost.passed_from = sizes.stacks.first;
  cost.passed_until = sizes.stacks.last;
  cost.passed_beside = sizes.encoded_bytes(shape.layer);
  cost.batch += kIdBytes * sizes.tokens + sizes.k * sizes.chunks;
  return cost;
}

}  // namespace megatron
