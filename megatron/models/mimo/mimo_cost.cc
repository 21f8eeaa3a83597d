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
// that. An encoder that is frozen in part saves all.
#include <algorithm>
#include <span>

#include "megatron/models/mimo/mimo_model.h"
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
    for (int64_t layer = 1; layer <= layers.num_layers; ++layer) {
      TransformerConfig of_layer = layers;
      LayerShape parts = shape;
      if (layers.attends_within_parts(layer) && window < layers.seq_length) {
        of_layer.seq_length = window;
        parts.samples = (rows + window - 1) / window;
      }
      costs.push_back(transformer_layer_cost(of_layer, layer, parts, /*offloaded=*/false));
    }
    if (trains_encoder) again = recomputed_layers(layers, layers.num_layers);
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
    if (!own.is_clip() && !own.has_last_norm()) return 0;
    return width() + (own.has_windows() ? 1 : 2) * rows * shape.sum;
  }
  // Cosines and sines, of half a head each, in the encoder; and of its tokens in the decoder
  int64_t turns() const { return own.has_own_sizes() ? rows * layers.kv_channels * shape.sum : 0; }
  int64_t token_turns() const {
    return own.has_own_sizes() ? given.tokens * language.rotary_width() * shape.sum : 0;
  }
  double divided() const { return static_cast<double>(shape.tensor); }
  bool trains() const { return trains_encoder || trains_projector; }

  const MimoConfig own;
  const TransformerConfig& language;
  const TransformerConfig layers;
  const LayerShape& given;
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
  int64_t saved = z.pixels() * z.shape.element;
  saved += z.norm() + z.turns();
  saved += z.again.units * z.width();
  for (const LayerCost& layer : z.recorded()) saved += layer.saved().total();
  return saved;
}

int64_t features_saved(const Images& z) {
  if (!z.trains()) return z.token_turns();
  int64_t saved = z.read() + 2 * z.activated() + z.projector_norm();
  saved += z.placed() * (kPlaceBytes + z.language.hidden_size * z.shape.element);
  if (z.own.vision_newlines) saved += z.given.tokens * z.shape.element;
  return saved + z.token_turns();
}

// From pixels to rows of the first layer; ends with what is saved.
void forward(const Images& z, AllocationTrack& track) {
  const int64_t numbers = z.pixels() * z.shape.element, sums = z.pixels() * z.shape.sum,
                index = z.pixels() * kPixelIndexBytes, w = z.width();
  if (z.own.has_windows()) track.take(z.pixels());  // in their order
  track.touch(2 * index);
  track.touch(index + sums + (z.shape.element != z.shape.sum ? numbers : 0));
  track.take(numbers);
  if (z.own.has_windows()) track.give(z.pixels());
  track.take(2 * w);  // conv1; with the class row, or empty rows
  track.give(w);
  track.take(z.turns());
  track.touch(z.own.has_own_sizes() ? z.turns() : w);  // places as numbers; with positions
  if (z.own.is_clip()) track.take(z.norm());
  if (!z.trains_encoder) track.give(track.live() - w - z.turns());
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
  if (z.own.has_last_norm()) track.take(z.norm());
  if (z.own.has_last_norm() && !z.trains_encoder) track.give(z.norm());
  if (!z.trains_encoder) track.give(z.turns());
  track.take(z.read());
  track.give(w);  // what the last layer gave
  track.take(2 * z.activated() + z.given_rows() + z.projector_norm());
  if (!z.trains()) track.give(z.read() + 2 * z.activated() + z.projector_norm());
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

// From the gradient of the first layer's input, with all saved.
void backward(const Images& z, AllocationTrack& track) {
  if (!z.trains()) return;
  const int64_t whole = z.given_rows() * z.ranks, saved = features_saved(z);
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
  if (z.middle() > 0) {
    track.take(z.activated());
    track.give(z.given_rows() + z.activated());  // and what the second linear read
    track.take(z.activated());
    track.give(2 * z.activated());  // with the activation's input
  }
  const int64_t grad = z.middle() > 0 ? z.activated() : z.given_rows();
  if (!z.trains_encoder) return;
  track.take(z.read());
  track.give(grad - z.activated());
  track.give(saved - 2 * z.activated());
  track.take(z.width());
  track.give(z.read());
  if (z.own.has_last_norm()) track.give(z.norm());
  const std::span<const LayerCost> recorded = z.recorded();
  for (size_t i = recorded.size(); i-- > 0;) {
    track.touch(recorded[i].backward_peak(/*grad_is_held=*/false).most);
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
  track.touch(2 * z.width());  // of the norm, and without the class row
}

// Held by the linears between the passes I and W.
int64_t pending(const Images& z) {
  int64_t bytes = 0;
  if (z.trains_encoder) {
    bytes += z.pixels() * z.shape.element +
             z.pictures * z.own.patches() * z.layers.hidden_size * z.shape.element;
    for (const LayerCost& layer : z.costs) bytes += layer.first.pending + layer.second.pending;
  }
  if (z.trains_projector)
    bytes += z.read() + z.projector_norm() + 2 * z.activated() + z.given_rows();
  return bytes;
}

double encoder_products(const Images& z) {
  const auto in = static_cast<double>(z.own.patch_elements());
  double products = static_cast<double>(z.pictures * z.own.patches()) * in *
                    static_cast<double>(z.layers.hidden_size);
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
  if (z.trains() && z.given.sequence_parallel)
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
  if (own.hears())
    return "what an encoder of sounds (--audio-model-type) costs is not known to check\nhint: "
           "every "
           "rule holds; measure memory with a few steps";
  if (own.bidirectional_images)
    return "what attention in both directions within images (--bidirectional-images) costs is not "
           "known to check\nhint: every rule holds; measure memory with a few steps";
  if (!own.vision_newlines || own.most_pictures > 0) return {};
  return "how many pictures a sequence may have depends on the shapes of the images\nhint: "
         "--max-patches-per-sequence says how many patches they have at most";
}

EndsCost mimo_ends_cost(const ModelConfig& config, const EndsShape& shape) {
  EndsCost cost = language_ends_cost(config, shape);
  if (!config.own.as_or_default<MimoConfig>().is_given()) return cost;
  const Images z(config, shape);
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
  const bool taken = z.ranks > 1 || z.own.vision_newlines || z.own.has_windows();
  cost.media = z.pixels() + kSegmentBytes * z.rows + (taken ? 2 : 1) * kPlaceBytes * z.placed();
  if (z.own.has_own_sizes()) cost.media += kPlaceBytes * (2 * z.rows + 3 * z.given.tokens);
  if (z.own.has_windows()) cost.media += kSegmentBytes * z.rows + kPlaceBytes * z.features;
  cost.modules = {encoder_cost(z), projector_cost(z)};
  const bool divided = z.own.divides_encoders();
  const int64_t of_tensor_ranks = z.given_rows() * (divided ? 1 : z.given.tensor);
  if (divided) {
    cost.embedding.tensor += divided_traffic(z);
  } else if (z.given.tensor > 1) {
    const double one_way = scatter_bytes(z.given.tensor, static_cast<double>(of_tensor_ranks));
    cost.embedding.tensor += {one_way, z.trains() && z.given.sequence_parallel ? one_way : 0};
  }
  if (z.given.context > 1) {
    const double one_way =
        scatter_bytes(z.given.context, static_cast<double>(of_tensor_ranks * z.given.context));
    cost.embedding.context += {one_way, z.trains() ? one_way : 0};
  }
  return cost;
}

}  // namespace megatron
