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
// With --encoder-recompute-granularity full a recomputed unit of layers saves its input alone.
// Where the encoder is frozen as a whole it saves nothing, and with the projector neither does
// that. An encoder that is frozen in part saves all. Of an encoder on segments of its own each has
// its part of this; features become tokens on the segment with the embedding.
#include <algorithm>
#include <span>

#include "megatron/models/common/encoder_part.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/mimo/sound_cost.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

constexpr int64_t kPlaceBytes = 8, kPixelIndexBytes = 8;
constexpr int64_t kSegmentBytes = 5 * kPlaceBytes;  // of a row: UnpaddedRows

constexpr const char *kEncoder = "vision_model.", *kProjector = "vision_projection.";

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

// Sizes of the worst micro-batch.
struct Images {
  Images(const ModelConfig& config, const EndsShape& of)
      : own(with_largest(config.own.as_or_default<MimoConfig>(), config.transformer)),
        language(config.transformer),
        layers(own.recomputing(own.encoder(language))),
        given(of.layer),
        part(of.segment != nullptr ? encoder_part(*of.segment, layers.num_layers)
                                   : EncoderPart{0, layers.num_layers}),
        places(of.segment == nullptr || of.segment->embedding),
        trains_encoder(!of.trains || of.trains(kEncoder)),
        trains_projector(!of.trains || of.trains(kProjector)) {
    const int64_t room = std::max<int64_t>(1, language.seq_length / own.features());
    const int64_t of_sequence = own.most_pictures > 0 && own.vision_newlines ? own.most_pictures
                                : own.most_pictures > 0 ? std::min(room, own.most_pictures)
                                                        : room;
    all = given.samples * of_sequence;
    ranks = (own.divides_encoders() ? 1 : given.tensor) * given.context;
    pictures = (all + ranks - 1) / ranks;
    rows = pictures * own.encoder_rows();
    features = pictures * own.features();
    padded = features * ranks;
    shape = given;
    shape.samples = pictures;
    shape.tokens = shape.rows = rows;
    shape.residual = shape.element;
    shape.tensor = own.divides_encoders() ? given.tensor : 1;
    shape.context = 1;
    shape.context_levels.clear();
    shape.sequence_parallel = shape.documents = shape.padded = false;
    shape.unpadded = true;
    const int64_t window = 4 * own.window_side() * own.window_side();
    for (int64_t layer = part.first + 1; layer <= part.first + part.count; ++layer) {
      TransformerConfig of_layer = layers;
      LayerShape parts = shape;
      if (layers.attends_within_parts(layer) && window < layers.seq_length) {
        of_layer.seq_length = window;
        parts.samples = (rows + window - 1) / window;
      }
      costs.push_back(transformer_layer_cost(of_layer, layer, parts, /*offloaded=*/false));
    }
    if (trains_encoder) again = recomputed_layers(layers, part.count);
  }

  // The layers of recomputed unit `unit`.
  std::span<const LayerCost> of_unit(int64_t unit) const {
    const int64_t first = unit * again.unit_layers;
    return std::span(costs).subspan(
        static_cast<size_t>(first),
        static_cast<size_t>(std::min(again.unit_layers, again.layers - first)));
  }
  // Those that are not recomputed
  std::span<const LayerCost> recorded() const {
    return std::span(costs).subspan(static_cast<size_t>(again.layers));
  }

  int64_t middle() const {
    if (own.vision_projection_type != VisionProjection::kMlp) return 0;
    return own.vision_projection_ffn_hidden_size > 0 ? own.vision_projection_ffn_hidden_size
                                                     : language.hidden_size;
  }
  int64_t pixels() const { return pictures * own.patches() * own.patch_elements(); }
  int64_t placed() const { return std::min(all * own.features(), given.tokens); }
  // Bytes
  int64_t width() const { return rows * layers.hidden_size * shape.element; }
  int64_t read() const { return features * own.feature_size() * shape.element; }
  int64_t activated() const { return features * middle() * shape.element; }
  int64_t given_rows() const { return features * language.hidden_size * shape.element; }
  int64_t of_sequences() const {
    return given.tokens * language.hidden_size * shape.element;  // [s, b, h]
  }
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
  bool begins() const { return part.is_there() && part.begins; }
  bool ends() const { return part.is_there() && part.ends; }  // and the projector
  bool has_last_norm() const { return own.has_last_norm() && ends(); }
  double divided() const { return static_cast<double>(shape.tensor); }
  bool trains() const { return trains_encoder || trains_projector; }

  const MimoConfig own;
  const TransformerConfig& language;
  const TransformerConfig layers;
  const LayerShape& given;
  const EncoderPart part;  // of the segment
  const bool places;       // features become tokens on it
  const bool trains_encoder, trains_projector;
  int64_t ranks = 1;              // of tp and cp
  int64_t all = 0, pictures = 0;  // of all these ranks, of one
  int64_t rows = 0, features = 0;
  int64_t padded = 0;  // features of all ranks, as many of each as of the one with most
  LayerShape shape;    // of the encoder's layers
  std::vector<LayerCost> costs;
  RecomputedLayers again;
};

int64_t encoder_saved(const Images& z) {
  if (!z.trains_encoder) return 0;
  int64_t saved = z.begins() ? z.pixels() * z.shape.element : 0;
  saved += z.norm() + z.turns();
  saved += z.again.units * z.width();
  for (const LayerCost& layer : z.recorded()) saved += layer.saved().total();
  return saved;
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

// From the input of the layers to the output of the last one.
void forward_layers(const Images& z, AllocationTrack& track) {
  const int64_t w = z.width();
  track.take(z.turns());
  track.touch(z.turns());  // places as numbers
  for (int64_t unit = 0; unit < z.again.units; ++unit) {
    int64_t most = 0;
    for (const LayerCost& layer : z.of_unit(unit)) most = std::max(most, layer.unrecorded_peak());
    track.take(w);  // its output; its input is there
    track.touch(most + (z.again.longest > 1 ? w : 0));
  }
  for (const LayerCost& layer : z.recorded()) {
    if (z.trains_encoder) {
      track.touch(layer.forward_peak());
      track.take(layer.saved().total());  // its input is there, its output comes
    } else {
      track.touch(layer.stream + layer.unrecorded_peak());
    }
  }
}

// From the last layer's output to the projected features.
void forward_end(const Images& z, AllocationTrack& track) {
  if (z.has_last_norm()) track.take(z.norm());
  if (z.has_last_norm() && !z.trains_encoder) track.give(z.norm());
  if (!z.trains_encoder) track.give(z.turns());
  track.take(z.read());
  track.give(z.width());  // what the last layer gave
  track.take(2 * z.activated() + z.given_rows() + z.projector_norm());
  if (!z.trains()) track.give(z.read() + 2 * z.activated() + z.projector_norm());
}

// What the segment before gives; where nothing saves it, it is held besides what is made of it.
int64_t arrived(const Images& z) {
  if (z.part.is_there()) return (z.trains_encoder ? 1 : 2) * z.width();
  return (z.ranks > 1 ? 2 : 1) * z.given_rows();
}

// From pixels, or what the segment before gives, to rows of the first layer of the language model,
// or what the segment gives; ends with what is saved.
void forward(const Images& z, AllocationTrack& track) {
  if (z.begins())
    forward_begin(z, track);
  else
    track.take(arrived(z));
  if (z.part.is_there()) forward_layers(z, track);
  if (z.ends()) forward_end(z, track);
  if (!z.places) return;
  if (z.ranks > 1) {
    const int64_t whole = z.given_rows() * z.ranks;
    track.take(z.given_rows() + whole);
    track.give(2 * z.given_rows());
    track.take(whole);  // those that are taken
    track.give(whole);
  } else if (z.own.has_windows()) {
    track.touch(z.given_rows());  // in the order of the picture
  }
  const int64_t placed = z.of_sequences();
  track.take(kPlaceBytes * z.placed());
  track.take(2 * placed);
  track.touch(z.own.vision_newlines ? placed : 0);
}

// From the gradient of the first layer's input to that of the projected features.
void backward_of_places(const Images& z, AllocationTrack& track) {
  const int64_t whole = z.given_rows() * z.ranks;
  track.take(z.of_sequences());  // of the placed rows, then of the features
  track.take(whole);
  track.give(z.of_sequences());
  if (z.ranks > 1) {
    track.take(whole);  // in the order of the ranks
    track.give(whole);
    track.take(z.given_rows());
    track.give(whole);
  } else if (z.own.has_windows()) {
    track.touch(z.given_rows());  // in the order of the windows
  }
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

void backward_of_layers(const Images& z, AllocationTrack& track) {
  const std::span<const LayerCost> recorded = z.recorded();
  for (size_t i = recorded.size(); i-- > 0;) {
    const bool held = !z.ends() && i + 1 == recorded.size();  // of a transfer
    track.touch(recorded[i].backward_peak(held).most);
    track.give(recorded[i].saved().total());
  }
  for (int64_t unit = z.again.units; unit-- > 0;) {
    int64_t saved_again = -z.width(), most = 0;  // the input is there
    for (const LayerCost& layer : z.of_unit(unit)) {
      saved_again += layer.saved().total();
      most = std::max(most, layer.backward_peak(/*grad_is_held=*/true).most);
    }
    track.touch(saved_again + most);
    track.give(z.width());
  }
}

// With all saved.
void backward(const Images& z, AllocationTrack& track) {
  if (!z.trains()) return;
  if (z.places) backward_of_places(z, track);
  if (z.ends()) backward_of_end(z, track);
  if (!z.trains_encoder || !z.part.is_there()) return;
  backward_of_layers(z, track);
  if (z.begins()) track.touch(2 * z.width());  // of the norm, and without the class row
}

// Held by the linears between the passes I and W.
int64_t pending(const Images& z) {
  int64_t bytes = 0;
  if (z.trains_encoder) {
    if (z.begins())
      bytes += z.pixels() * z.shape.element +
               z.pictures * z.own.patches() * z.layers.hidden_size * z.shape.element;
    for (const LayerCost& layer : z.costs) bytes += layer.first.pending + layer.second.pending;
  }
  if (z.trains_projector && z.ends())
    bytes += z.read() + z.projector_norm() + 2 * z.activated() + z.given_rows();
  return bytes;
}

double encoder_products(const Images& z) {
  const auto in = static_cast<double>(z.own.patch_elements());
  double products = z.begins() ? static_cast<double>(z.pictures * z.own.patches()) * in *
                                     static_cast<double>(z.layers.hidden_size)
                               : 0.0;
  for (const LayerCost& layer : z.costs)
    products += static_cast<double>(z.rows) * layer.weight_products() / z.divided();
  return products;
}

ModuleCost encoder_cost(const Images& z) {
  ModuleCost cost{kEncoder, encoder_products(z)};
  const double rows = static_cast<double>(z.rows) / z.divided();
  for (const LayerCost& layer : z.costs) {
    cost.scores += rows * layer.score_products();
    cost.moved += rows * (layer.first.moved_elements + layer.second.moved_elements);
  }
  for (int64_t unit = 0; unit < z.again.units; ++unit)
    for (const LayerCost& layer : z.of_unit(unit)) cost.again += rows * layer.products();
  cost.weight_grads = cost.grads = z.trains_encoder;
  return cost;
}

// Of tensor ranks that divide the encoder: sums of its layers, and of the gradients of features,
// which are of each rank's tokens.
Traffic divided_traffic(const Images& z) {
  Traffic sent;
  for (const LayerCost& layer : z.costs) {
    sent.forward += layer.tensor().forward;
    if (z.trains_encoder) sent.backward += layer.tensor().backward;
  }
  for (int64_t unit = 0; unit < z.again.units; ++unit)
    for (const LayerCost& layer : z.of_unit(unit)) sent.backward += layer.tensor().forward;
  if (z.places && z.trains() && z.given.sequence_parallel)
    sent.backward += 2 * scatter_bytes(z.given.tensor, static_cast<double>(z.given_rows()));
  return sent;
}

ModuleCost projector_cost(const Images& z) {
  const auto in = static_cast<double>(z.own.feature_size()),
             out = static_cast<double>(z.language.hidden_size),
             middle = static_cast<double>(z.middle()), rows = static_cast<double>(z.features);
  ModuleCost cost{kProjector, rows * (middle > 0 ? middle * (in + out) : in * out)};
  cost.moved = 5 * rows * middle;
  cost.weight_grads = z.trains_projector;
  cost.grads = z.trains();
  return cost;
}

}  // namespace

std::string_view mimo_unplanned(const ModelConfig& config) {
  const auto& own = config.own.as_or_default<MimoConfig>();
  if (own.bidirectional_images)
    return "what attention in both directions within images (--bidirectional-images) costs is not "
           "known to check\nhint: every rule holds; measure memory with a few steps";
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

// Of gathered features, and within divided layers.
void add_traffic(const Images& z, EndCost& cost) {
  const bool divided = z.own.divides_encoders();
  const int64_t of_tensor_ranks = z.given_rows() * (divided ? 1 : z.given.tensor);
  if (divided) {
    cost.tensor += divided_traffic(z);
  } else if (z.places && z.given.tensor > 1) {
    const double one_way = scatter_bytes(z.given.tensor, static_cast<double>(of_tensor_ranks));
    cost.tensor += {one_way, z.trains() && z.given.sequence_parallel ? one_way : 0};
  }
  if (z.places && z.given.context > 1) {
    const double one_way =
        scatter_bytes(z.given.context, static_cast<double>(of_tensor_ranks * z.given.context));
    cost.context += {one_way, z.trains() ? one_way : 0};
  }
}

EndsCost cost_with_images(const ModelConfig& config, const EndsShape& shape) {
  EndsCost cost = language_ends_cost(config, shape);
  if (!config.own.as_or_default<MimoConfig>().is_given()) return cost;
  const Images z(config, shape);
  if (!z.places) cost.embedding = {};  // that of the language model is on another segment
  cost.media_rows = z.width();
  cost.media_features = z.given_rows();
  if (!z.places && !z.part.is_there()) return cost;
  cost.encoder = encoder_saved(z);
  cost.features = features_saved(z);
  const int64_t saved = cost.encoder + cost.features;
  cost.embedding.saved += saved;
  AllocationTrack forwards, backwards;
  forward(z, forwards);
  cost.embedding.forward_peak = forwards.most() - saved;
  backward(z, backwards);
  cost.embedding.backward_peak = backwards.most();
  cost.embedding.pending = pending(z);
  cost.media = media_bytes(z);
  if (z.part.is_there()) cost.modules.push_back(encoder_cost(z));
  if (z.ends()) cost.modules.push_back(projector_cost(z));
  add_traffic(z, cost.embedding);
  return cost;
}

}  // namespace

EndsCost mimo_ends_cost(const ModelConfig& config, const EndsShape& shape) {
  EndsCost cost = cost_with_images(config, shape);
  if (config.own.as_or_default<MimoConfig>().hears()) add_sounds(config, shape, cost);
  return cost;
}

}  // namespace megatron
