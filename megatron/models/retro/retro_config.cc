#include "megatron/models/retro/retro_config.h"

#include <algorithm>
#include <functional>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/models/model.h"

namespace megatron {
namespace {

constexpr int64_t kFirstOfFew = 6, kFirstOfMany = 9, kFew = 15, kStep = 3;

}  // namespace

void RetroConfig::fields(FieldVisitor& v) {
  v.group("retro");
  v.role(FieldRole::kArchitecture);
  v.field(
      {"retro_chunk_length", "--retro-chunk-length --retro-gpt-chunk-length"}, retro_chunk_length,
      "tokens of a chunk, for each of which neighbours are read; a neighbour has twice as many");
  v.field("retro_layers", retro_layers,
          "numbers of the layers that read neighbours, from 1; default: the 6th (of more than 15 "
          "layers the 9th) and every third after it");
  v.field("retro_encoder_num_layers", retro_encoder_num_layers,
          "layers of the encoder of neighbours");
  v.role(FieldRole::kNumerics);
  v.field("retro_num_neighbors", retro_num_neighbors, "neighbours of a chunk that are read");
  v.field("retro_encoder_hidden_dropout", retro_encoder_hidden_dropout,
          "dropout of the encoder of neighbours, of the outputs of its sublayers");
  v.field("retro_encoder_attention_dropout", retro_encoder_attention_dropout,
          "dropout of the encoder of neighbours, of attention");
}

void RetroConfig::validate(Violations& v) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " is ", value), "a positive number");
  };
  positive("--retro-chunk-length", retro_chunk_length);
  positive("--retro-encoder-num-layers", retro_encoder_num_layers);
  positive("--retro-num-neighbors", retro_num_neighbors);
  const auto share = [&](const char* flag, double value) {
    v.require(value >= 0 && value < 1, cat(flag, " is ", value), "0 or more and below 1");
  };
  share("--retro-encoder-hidden-dropout", retro_encoder_hidden_dropout);
  share("--retro-encoder-attention-dropout", retro_encoder_attention_dropout);
  v.require(std::is_sorted(retro_layers.begin(), retro_layers.end(), std::less_equal<>()) &&
                (retro_layers.empty() || retro_layers.front() > 0),
            cat("--retro-layers is ", listed(retro_layers, {}, " ")),
            "numbers of layers from 1, ascending, each once");
}

std::vector<int64_t> RetroConfig::layers(int64_t num_layers) const {
  if (!retro_layers.empty()) return retro_layers;
  std::vector<int64_t> all;
  for (int64_t i = num_layers <= kFew ? kFirstOfFew : kFirstOfMany; i <= num_layers; i += kStep)
    all.push_back(i);
  return all;
}

RetroStacks retro_stacks(const ModelConfig& config) {
  const auto& own = config.own.as_or_default<RetroConfig>();
  const int64_t num_layers = config.transformer.num_layers;
  const std::vector<int64_t> layers = own.layers(num_layers);
  MEGATRON_CHECK(!layers.empty() && layers.back() <= num_layers, "of ", num_layers,
                 " layers none is the one that reads neighbours first, or --retro-layers ",
                 listed(layers, {}, " "), " goes beyond them",
                 "\nhint: more --num-layers, or other --retro-layers");
  RetroStacks stacks{config.transformer, config.transformer, layers.front(), layers.back()};
  std::vector<const char*> kinds(static_cast<size_t>(num_layers), "*-");
  for (const int64_t layer : layers) kinds[static_cast<size_t>(layer - 1)] = "*r-";
  stacks.decoder.layer_pattern = listed(kinds, {}, ",");
  // Its layers are numbered after those of the decoder; the first one reads the stream.
  kinds.assign(static_cast<size_t>(num_layers + own.retro_encoder_num_layers), "*-");
  kinds[static_cast<size_t>(num_layers)] = "*x-";
  stacks.encoder.layer_pattern = listed(kinds, {}, ",");
  stacks.encoder.causal = false;
  stacks.encoder.num_layers = own.retro_encoder_num_layers;
  stacks.encoder.seq_length = own.retrieved_length();
  stacks.encoder.hidden_dropout = own.retro_encoder_hidden_dropout;
  stacks.encoder.attention_dropout = own.retro_encoder_attention_dropout;
  if (config.transformer.recomputes("retro_encoder")) {
    stacks.encoder.recompute_granularity = RecomputeGranularity::kFull;
    stacks.encoder.recompute_method = RecomputeMethod::kUniform;
    stacks.encoder.recompute_num_layers = 1;
  }
  return stacks;
}

double retrieval_products(const ModelConfig& config) {
  const auto& own = config.own.as_or_default<RetroConfig>();
  const TransformerConfig& t = config.transformer;
  const auto h = static_cast<double>(t.hidden_size), a = static_cast<double>(t.attention_width()),
             f = static_cast<double>(t.ffn_hidden_size),
             m = static_cast<double>(own.retro_chunk_length), r = 2 * m,
             neighbors = static_cast<double>(own.retro_num_neighbors), read = 2 * neighbors;
  const bool gated = t.swiglu || t.geglu || t.quick_geglu || t.exact_geglu;
  const double cross = 2 * h * a + read * 2 * h * a + 2 * a * neighbors * r;
  const double encoder_layer = 4 * h * a + 2 * a * r + (gated ? 3 : 2) * h * f;
  const double reads_stream = 2 * h * a + 2 * a * m;
  return cross * static_cast<double>(own.layers(t.num_layers).size()) + 2 * h * a +
         read * (encoder_layer * static_cast<double>(own.retro_encoder_num_layers) + reads_stream);
}

}  // namespace megatron
