// What the encoder of images costs a rank, besides the language model. Letters as in
// models/common/ends_cost.h; of the encoder h_v its width, h_f that of a feature, d of a head, p
// the numbers of a patch, m the width of the projector; P the pictures of the worst legal
// micro-batch that a rank encodes, n patches each, r = P (n + 1) rows (P n of SigLIP and Qwen), N =
// P times the features of a picture. Of pictures of their own sizes one fills each sequence.
//
// Held by a micro-batch: p P n bytes of pixels, 40 r of segments, places of all features; of
// pictures of their own sizes 16 r of places and 24 T of positions, with windows 40 r of those and
// 8 N of their order.
// Saved behind the embedding:
//   pixels       p P n e                  as the numbers that conv1 reads
//   norm         r h_v e + 8 r            CLIP before the layers, SigLIP and Qwen behind them: the
//                                         input and its statistics (of an RMSNorm 4 r)
//   turns        4 r d, and 4 T d         of pictures of their own sizes: cosines and sines of rows
//                                         and columns, in the encoder and in the decoder
//   layers       as those of a language model, of P sequences; with windows of as many as there are
//   projector    N h_f e                  features
//                2 N m e                  mlp: input and output of the activation, m wide
//                N h_f e + 8 N            the norm's output, and its statistics
//   features     those that become tokens here, h e and a place of 8 bytes each
// With --encoder-recompute-granularity full a recomputed unit of layers saves its input alone. What
// --encoder-offload-modules names is in host memory.
// Where the encoder is frozen as a whole it saves nothing, and with the projector neither does
// that. An encoder that is frozen in part saves all. Of an encoder on segments of its own each has
// its part of this; features become tokens on the segment with the embedding.
//
// With --bidirectional-images layers of the language model cost more (core_attention_cost.h), and a
// micro-batch holds 24 bytes for each token of its pictures (32 with documents), or on every
// segment the mask of all its tokens.
#include <algorithm>

#include "megatron/models/mimo/encoder_cost.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/mimo/sound_cost.h"
#include "megatron/transformer/attention/core_attention_cost.h"
#include "megatron/transformer/layer_kinds.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

constexpr int64_t kPlaceBytes = 8, kPixelIndexBytes = 8;
constexpr int64_t kSegmentBytes = 5 * kPlaceBytes;  // of a row: UnpaddedRows

// With the pictures of the worst micro-batch: of their own sizes one of all tokens of a sequence,
// whose height and width say no more than their product.
MimoConfig with_largest(MimoConfig own, const TransformerConfig& language) {
  if (!own.has_own_sizes()) return own;
  const int64_t features = own.most_pictures > 0 ? std::min(own.most_pictures, language.seq_length)
                                                 : language.seq_length;
  own.img_h = 2 * own.patch_dim;
  own.img_w = 2 * own.patch_dim * features;
  own.most_pictures = 1;
  return own;
}

int64_t pictures_of_sequence(const MimoConfig& own, const TransformerConfig& language) {
  const int64_t room = std::max<int64_t>(1, language.seq_length / own.features());
  if (own.most_pictures == 0) return room;
  return own.vision_newlines ? own.most_pictures : std::min(room, own.most_pictures);
}

// Of layers of the language model: features of a picture see each other in both directions.
LayerShape with_blocks(const ModelConfig& config, LayerShape shape) {
  const auto& given = config.own.as_or_default<MimoConfig>();
  if (!given.bidirectional_images) return shape;
  const MimoConfig own = with_largest(given, config.transformer);
  shape.block_length = std::min(own.features(), config.transformer.seq_length);
  shape.block_tokens = std::min(
      shape.samples * pictures_of_sequence(own, config.transformer) * own.features(), shape.tokens);
  return shape;
}

// Sizes of the worst micro-batch.
struct Images : EncoderCost {
  Images(const ModelConfig& config, const EndsShape& of)
      : Images(with_largest(config.own.as_or_default<MimoConfig>(), config.transformer), config,
               of) {}

  Images(const MimoConfig& media, const ModelConfig& config, const EndsShape& of)
      : EncoderCost(media, media.keeping(media.encoder(config.transformer)),
                    {"vision_model.", "vision_projection.", media.vision_projection_type,
                     media.vision_projection_ffn_hidden_size, media.feature_size()},
                    config, of) {
    all = given.samples * pictures_of_sequence(own, language);
    pictures = (all + ranks - 1) / ranks;
    rows = pictures * own.encoder_rows();
    features = pictures * own.features();
    set_samples(pictures);
    const int64_t window = 4 * own.window_side() * own.window_side();
    for (int64_t layer = part.first + 1; layer <= part.first + part.count; ++layer) {
      TransformerConfig of_layer = layers;
      LayerShape parts = shape;
      if (layers.attends_within_parts(layer) && window < layers.seq_length) {
        of_layer.seq_length = window;
        parts.samples = (rows + window - 1) / window;
      }
      costs.push_back(transformer_layer_cost(of_layer, layer, parts, offloads(layer)));
    }
  }

  int64_t pixels() const { return pictures * own.patches() * own.patch_elements(); }
  int64_t placed() const { return std::min(all * own.features(), given.tokens); }
  // Bytes
  int64_t projector_norm() const {
    return own.vision_projection_norm ? read() + 2 * features * shape.sum : 0;
  }
  // Saved by the norm besides those of the layers, which is before or behind them
  int64_t norm() const {
    if (!(own.is_clip() && begins()) && !(own.has_last_norm() && ends())) return 0;
    return width() + (own.has_windows() ? 1 : 2) * rows * shape.sum;
  }
  // Cosines and sines, of half a head each, in the encoder; and of its tokens in the decoder
  int64_t turns() const {
    return own.has_own_sizes() && part.is_there() ? rows * layers.kv_channels * shape.sum : 0;
  }
  int64_t token_turns() const {
    return own.has_own_sizes() ? given.tokens * language.rotary_width() * shape.sum : 0;
  }
  bool has_last_norm() const { return own.has_last_norm() && ends(); }

  int64_t all = 0, pictures = 0;  // of all ranks, of one
};

int64_t encoder_saved(const Images& z) {
  if (!z.trains_encoder) return 0;
  const int64_t pixels = z.begins() ? z.pixels() * z.shape.element : 0;
  return pixels + z.norm() + z.turns() + z.layers_saved();
}

int64_t features_saved(const Images& z) {
  const int64_t turns = z.places ? z.token_turns() : 0;
  if (!z.trains()) return turns;
  int64_t saved = z.ends() ? z.read() + 2 * z.activated() + z.projector_norm() : 0;
  if (!z.places) return saved;
  saved += z.placed() * (kPlaceBytes + z.language.hidden_size * z.shape.element);
  if (z.own.vision_newlines) saved += z.given.tokens * z.shape.element;
  return saved + turns;
}

// From pixels to rows of the first layer.
void forward_begin(const Images& z, AllocationTrack& track) {
  const int64_t numbers = z.pixels() * z.shape.element, sums = z.pixels() * z.shape.sum,
                index = z.pixels() * kPixelIndexBytes, w = z.width();
  if (z.own.has_windows()) track.take(z.pixels());  // in their order
  track.touch(2 * index);
  track.touch(index + sums + (z.shape.element != z.shape.sum ? numbers : 0));
  track.take(numbers);
  if (z.own.has_windows()) track.give(z.pixels());
  track.take(2 * w);  // conv1; with the class row, or empty rows
  track.give(w);
  if (!z.own.has_own_sizes()) track.touch(w);  // with positions
  if (z.own.is_clip()) track.take(z.norm());
  if (!z.trains_encoder) track.give(track.live() - w);
}

// From pixels, or what the segment before gives, to the output of the last layer here.
void forward_rows(const Images& z, AllocationTrack& track) {
  track.take(z.leaving_before());
  if (z.begins())
    forward_begin(z, track);
  else
    track.take(z.arrived());
  track.give(z.leaving_before());
  if (!z.part.is_there()) return;
  track.take(z.turns());
  track.touch(z.turns());  // places as numbers
  z.forward_layers(track);
}

// From there to features.
void forward_features(const Images& z, AllocationTrack& track) {
  if (z.has_last_norm()) track.take(z.norm());
  if (z.has_last_norm() && !z.trains_encoder) track.give(z.norm());
  if (!z.trains_encoder) track.give(z.turns());
  track.take(z.read());
  track.give(z.width());  // what the last layer gave
}

// From the last layer's output to the projected features.
void forward_end(const Images& z, AllocationTrack& track) {
  forward_features(z, track);
  track.take(2 * z.activated() + z.given_rows() + z.projector_norm());
  if (!z.trains()) track.give(z.read() + 2 * z.activated() + z.projector_norm());
}

// From pixels, or what the segment before gives, to rows of the first layer of the language model,
// or what the segment gives; ends with what is saved.
void forward(const Images& z, AllocationTrack& track) {
  forward_rows(z, track);
  if (z.ends()) forward_end(z, track);
  if (!z.places) return;
  z.gather_features(track);
  if (z.ranks == 1 && z.own.has_windows()) track.touch(z.given_rows());  // in the picture's order
  const int64_t placed = z.of_sequences();
  track.take(kPlaceBytes * z.placed());
  track.take(2 * placed);
  track.touch(z.own.vision_newlines ? placed : 0);
}

// To that of the last layer's output.
void backward_of_end(const Images& z, AllocationTrack& track) {
  const int64_t held = z.places ? z.given_rows() : 0;  // else of a transfer
  if (z.middle() > 0) {
    track.take(z.activated());
    track.give(held + z.activated());  // and what the second linear read
    track.take(z.activated());
    track.give(2 * z.activated());  // with the activation's input
  }
  const int64_t grad = z.middle() > 0 ? z.activated() : held;
  if (!z.trains_encoder) return;
  track.take(z.read());
  track.give(grad - z.activated());
  track.give(features_saved(z) - 2 * z.activated());
  track.take(z.width());
  track.give(z.read());
  if (z.has_last_norm()) track.give(z.norm());
}

// With all saved.
void backward(const Images& z, AllocationTrack& track) {
  if (!z.trains()) return;
  track.take(z.reloading());
  if (z.places) {
    z.backward_places(track);
    if (z.ranks == 1 && z.own.has_windows()) track.touch(z.given_rows());  // in the windows' order
  }
  if (z.ends()) backward_of_end(z, track);
  if (!z.trains_encoder || !z.part.is_there()) return;
  z.backward_layers(track);
  if (z.begins()) track.touch(2 * z.width());  // of the norm, and without the class row
}

// Held by the linears between the passes I and W.
int64_t pending(const Images& z) {
  int64_t bytes = 0;
  if (z.trains_encoder) {
    if (z.begins())
      bytes += z.pixels() * z.shape.element +
               z.pictures * z.own.patches() * z.layers.hidden_size * z.shape.element;
    bytes += z.layers_pending();
  }
  if (z.trains_projector && z.ends())
    bytes += z.read() + z.projector_norm() + 2 * z.activated() + z.given_rows();
  return bytes;
}

ModuleCost encoder_module(const Images& z) {
  if (!z.begins()) return z.encoder_module(0.0);
  return z.encoder_module(static_cast<double>(z.pictures * z.own.patches()) *
                          static_cast<double>(z.own.patch_elements()) *
                          static_cast<double>(z.layers.hidden_size));
}

}  // namespace

std::string_view mimo_unplanned(const ModelConfig& config) {
  const auto& own = config.own.as_or_default<MimoConfig>();
  if (!own.vision_newlines || own.most_pictures > 0) return {};
  return "how many pictures a sequence may have depends on the shapes of the images\nhint: "
         "--max-patches-per-sequence says how many patches they have at most";
}

namespace {

int64_t media_bytes(const Images& z) {
  const bool taken = z.ranks > 1 || z.own.vision_newlines || z.own.has_windows();
  int64_t bytes = z.begins() ? z.pixels() : 0;
  bytes += kSegmentBytes * z.rows + (taken ? 2 : 1) * kPlaceBytes * z.placed();
  if (z.own.has_own_sizes()) bytes += kPlaceBytes * (2 * z.rows + 3 * z.given.tokens);
  if (z.own.has_windows()) bytes += kSegmentBytes * z.rows + kPlaceBytes * z.features;
  return bytes;
}

// What layers know blocks of tokens by: places of a micro-batch, or a mask.
void add_blocks(const ModelConfig& config, const LayerShape& layer, EndsCost& cost) {
  const TransformerConfig& language = config.transformer;
  const LayerShape shape = with_blocks(config, layer);
  if (shape.block_tokens == 0) return;
  if (takes_token_blocks(language, shape, language.kv_channels)) {
    cost.media += (shape.documents ? 4 : 3) * kPlaceBytes * shape.block_tokens;
    return;
  }
  cost.passed_until = language.num_layers;
  cost.passed_beside = shape.samples * language.seq_length * language.seq_length;
}

EndsCost cost_with_images(const ModelConfig& config, const EndsShape& shape) {
  EndsCost cost = language_ends_cost(config, shape);
  if (!config.own.as_or_default<MimoConfig>().is_given()) return cost;
  const Images z(config, shape);
  add_blocks(config, shape.layer, cost);
  if (!z.places) cost.embedding = {};  // that of the language model is on another segment
  cost.media_rows = z.width();
  cost.media_features = z.given_rows();
  if (!z.places && !z.part.is_there()) return cost;
  cost.encoder = encoder_saved(z);
  cost.features = features_saved(z);
  const int64_t saved = cost.encoder + cost.features;
  cost.embedding.saved += saved;
  AllocationTrack forwards, backwards, alone;
  forward(z, forwards);
  forward_rows(z, alone);
  if (z.ends()) forward_features(z, alone);
  z.add_ahead(alone, cost);
  cost.embedding.forward_peak = forwards.most() - saved;
  backward(z, backwards);
  cost.embedding.backward_peak = backwards.most();
  cost.embedding.pending = pending(z);
  cost.media += media_bytes(z);
  cost.offloaded = z.offloaded();
  if (z.part.is_there()) cost.modules.push_back(encoder_module(z));
  if (z.ends()) cost.modules.push_back(z.projector_module());
  z.add_traffic(cost.embedding);
  return cost;
}

}  // namespace

LayerCost mimo_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                          bool offloaded) {
  return layer_cost(config.transformer, layer_number, with_blocks(config, shape), offloaded);
}

EndsCost mimo_ends_cost(const ModelConfig& config, const EndsShape& shape) {
  EndsCost cost = cost_with_images(config, shape);
  if (config.own.as_or_default<MimoConfig>().hears()) add_sounds(config, shape, cost);
  return cost;
}

}  // namespace megatron
