// Letters as in mimo_cost.cc; of the encoder of sounds h_a its width, B the filters, r = C n rows
// of C clips, N features of h_f each. The worst legal micro-batch has sounds of equal lengths, at
// most 30 s, whose features fill its sequences: other tokens beside each sound outweigh the row
// that two rows for a feature leave over.
//
// Held by a micro-batch: 4 B (2 r + 2 C) of frames, 16 r of the frame before each, 12 r of places
// in clips, 40 r of segments, 8 N of first rows, places of all features.
// Saved behind the embedding:
//   conv1        6 B r e + 2 r h_a e      three frames side by side, of two for a row; the input of
//                                         its activation
//   conv2        3 r h_a e + r h_a e      the same of rows
//   borders      r e                      of a type that is converted: which rows begin a clip
//   layers       as those of a language model, of C sequences
//   means        N h_a e + 8 N + 16 N     the norm's input and statistics, which rows
//   stacked      r h_a e + 8 r            the norm's input and statistics
//   projector, features                   as of images
#include "megatron/models/mimo/sound_cost.h"

#include <algorithm>
#include <span>

#include "megatron/models/common/encoder_part.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

constexpr int64_t kPlace = 8, kSegment = 5 * kPlace;  // bytes of an index, of a row of UnpaddedRows
constexpr const char *kAudioEncoder = "audio_model.", *kAudioProjector = "audio_projection.";

// Sizes of the worst micro-batch.
struct Sounds {
  Sounds(const ModelConfig& config, const EndsShape& of)
      : own(config.own.as_or_default<MimoConfig>()),
        language(config.transformer),
        layers(own.recomputing(own.audio_encoder(language))),
        given(of.layer),
        part(of.segment != nullptr ? encoder_part(*of.segment, layers.num_layers)
                                   : EncoderPart{0, layers.num_layers}),
        places(of.segment == nullptr || of.segment->embedding),
        trains_encoder(!of.trains || of.trains(kAudioEncoder)),
        trains_projector(!of.trains || of.trains(kAudioProjector)) {
    const int64_t s = std::max<int64_t>(1, language.seq_length),
                  of_clip = kAudioRows / own.rows_of_a_feature();
    // Of a sequence so many clips, of so many features
    const int64_t clips_of_sequence =
        own.stacks() ? std::max<int64_t>(1, s / of_clip) : (s + of_clip - 1) / of_clip;
    const int64_t one = own.stacks() ? of_clip : s / clips_of_sequence;
    ranks = (own.divides_encoders() ? 1 : given.tensor) * given.context;
    all = given.samples * clips_of_sequence * one;
    clips = (given.samples * clips_of_sequence + ranks - 1) / ranks;
    features = clips * one;
    rows = features * own.rows_of_a_feature();
    shape = given;
    shape.samples = clips;
    shape.tokens = shape.rows = rows;
    shape.residual = shape.element;
    shape.tensor = own.divides_encoders() ? given.tensor : 1;
    shape.context = 1;
    shape.context_levels.clear();
    shape.sequence_parallel = shape.documents = shape.padded = false;
    shape.unpadded = true;
    TransformerConfig of_layer = layers;
    of_layer.seq_length = rows / std::max<int64_t>(1, clips);
    for (int64_t layer = part.first + 1; layer <= part.first + part.count; ++layer)
      costs.push_back(transformer_layer_cost(of_layer, layer, shape, /*offloaded=*/false));
    if (trains_encoder) again = recomputed_layers(layers, part.count);
  }

  // The layers of recomputed unit `unit`, and those that are not recomputed.
  std::span<const LayerCost> of_unit(int64_t unit) const {
    const int64_t first = unit * again.unit_layers;
    return std::span(costs).subspan(
        static_cast<size_t>(first),
        static_cast<size_t>(std::min(again.unit_layers, again.layers - first)));
  }
  std::span<const LayerCost> recorded() const {
    return std::span(costs).subspan(static_cast<size_t>(again.layers));
  }

  int64_t middle() const {
    if (own.audio_projection_type != VisionProjection::kMlp) return 0;
    return own.audio_projection_ffn_hidden_size > 0 ? own.audio_projection_ffn_hidden_size
                                                    : language.hidden_size;
  }
  int64_t placed() const { return std::min(all, given.tokens); }
  // Bytes
  int64_t frames() const { return (2 * rows + 2 * clips) * own.audio_mel_bins; }  // numbers
  int64_t around_frames() const { return 6 * rows * own.audio_mel_bins * shape.element; }
  int64_t width() const { return rows * layers.hidden_size * shape.element; }
  int64_t means() const {  // of neighbouring rows
    return own.stacks() ? 0 : features * layers.hidden_size * shape.element;
  }
  int64_t read() const { return features * own.audio_feature_size() * shape.element; }
  int64_t activated() const { return features * middle() * shape.element; }
  int64_t given_rows() const { return features * language.hidden_size * shape.element; }
  int64_t of_sequences() const {
    return given.tokens * language.hidden_size * shape.element;  // [s, b, h]
  }
  int64_t borders() const { return shape.element != shape.sum ? rows * shape.element : 0; }
  int64_t convolved() const { return around_frames() + 6 * width() + borders(); }
  int64_t norm() const {
    if (own.stacks()) return width() + 2 * rows * shape.sum;
    return means() + 2 * features * (shape.sum + kPlace);
  }
  bool begins() const { return part.is_there() && part.begins; }
  bool ends() const { return part.is_there() && part.ends; }  // and the projector
  double divided() const { return static_cast<double>(shape.tensor); }
  bool trains() const { return trains_encoder || trains_projector; }

  const MimoConfig own;
  const TransformerConfig& language;
  const TransformerConfig layers;
  const LayerShape& given;
  const EncoderPart part;  // of the segment
  const bool places;       // features become tokens on it
  const bool trains_encoder, trains_projector;
  int64_t ranks = 1;  // of tp and cp
  int64_t all = 0;    // features of all these ranks
  int64_t clips = 0, rows = 0, features = 0;
  LayerShape shape;  // of the encoder's layers
  std::vector<LayerCost> costs;
  RecomputedLayers again;
};

int64_t saved_of_encoder(const Sounds& z) {
  if (!z.trains_encoder) return 0;
  int64_t saved = (z.begins() ? z.convolved() : 0) + (z.ends() ? z.norm() : 0);
  saved += z.again.units * z.width();
  for (const LayerCost& layer : z.recorded()) saved += layer.saved().total();
  return saved;
}

int64_t saved_of_features(const Sounds& z) {
  if (!z.trains()) return 0;
  return (z.ends() ? z.read() + 2 * z.activated() : 0) +
         (z.places ? z.placed() * (kPlace + z.language.hidden_size * z.shape.element) : 0);
}

// From frames to rows of the encoder's first layer.
void convolve(const Sounds& z, AllocationTrack& track) {
  const int64_t converted = z.borders() > 0 ? z.frames() * z.shape.element : 0, w = z.width();
  track.take(converted + 2 * z.around_frames());
  track.give(converted + z.around_frames());
  track.take(4 * w);  // conv1, and its activation
  track.touch(2 * w);
  track.take(z.borders() + w + 3 * w);  // the rows before, three of each
  track.give(3 * w);
  track.take(2 * w);  // conv2, and its activation
  track.touch(2 * w);
  if (!z.trains_encoder) track.give(track.live() - w);
}

// From the input of the part's first layer to the output of its last one.
void encode(const Sounds& z, AllocationTrack& track) {
  const int64_t w = z.width();
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

// To the projected features.
void project(const Sounds& z, AllocationTrack& track) {
  track.take(2 * z.means());  // neighbours
  track.take(z.norm() + z.read());
  track.give(z.width() + 2 * z.means());
  if (!z.trains_encoder) track.give(z.norm());
  track.take(2 * z.activated() + z.given_rows());
  if (!z.trains()) track.give(z.read() + 2 * z.activated());
}

// From frames, or what the segment before gives, to rows of the first layer of the language model,
// or what the segment gives; ends with what is saved.
void run_forward(const Sounds& z, AllocationTrack& track) {
  if (z.begins())
    convolve(z, track);
  else if (z.part.is_there())
    track.take((z.trains_encoder ? 1 : 2) * z.width());  // it is held by the transfer, too
  else
    track.take((z.ranks > 1 ? 2 : 1) * z.given_rows());
  if (z.part.is_there()) encode(z, track);
  if (z.ends()) project(z, track);
  if (!z.places) return;
  if (z.ranks > 1) {
    const int64_t whole = z.given_rows() * z.ranks;
    track.take(z.given_rows() + whole);
    track.give(2 * z.given_rows());
    track.take(whole);  // those that are taken
    track.give(whole);
  }
  track.take(kPlace * z.placed());
  track.take(2 * z.of_sequences());
}

// From the gradient of the first layer's input to that of the projected features.
void unplace(const Sounds& z, AllocationTrack& track) {
  const int64_t whole = z.given_rows() * z.ranks;
  track.take(z.of_sequences());  // of the placed rows, then of the features
  track.take(whole);
  track.give(z.of_sequences());
  if (z.ranks == 1) return;
  track.take(whole);  // in the order of the ranks
  track.give(whole);
  track.take(z.given_rows());
  track.give(whole);
}

// To that of the last layer's output.
void unproject(const Sounds& z, AllocationTrack& track) {
  const int64_t held = z.places ? z.given_rows() : 0;  // else of a transfer
  if (z.middle() > 0) {
    track.take(z.activated());
    track.give(held + z.activated());  // and what the second linear read
    track.take(z.activated());
    track.give(2 * z.activated());  // with the activation's input
  }
  if (!z.trains_encoder) return;
  track.take(z.read());
  track.give(z.middle() > 0 ? 0 : held);
  track.give(saved_of_features(z) - 2 * z.activated());
  track.touch(2 * z.width());
  track.take(z.width());
  track.give(z.read() + z.norm());
}

// With all saved.
void run_backward(const Sounds& z, AllocationTrack& track) {
  if (!z.trains()) return;
  if (z.places) unplace(z, track);
  if (z.ends()) unproject(z, track);
  if (!z.trains_encoder || !z.part.is_there()) return;
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
  if (z.begins()) track.touch(5 * z.width());  // of three rows each, and of the rows before
}

// Held by the linears between the passes I and W.
int64_t pending_of(const Sounds& z) {
  int64_t bytes = 0;
  if (z.trains_encoder) {
    if (z.begins()) bytes += z.around_frames() + 6 * z.width();
    for (const LayerCost& layer : z.costs) bytes += layer.first.pending + layer.second.pending;
  }
  if (z.trains_projector && z.ends()) bytes += z.read() + 2 * z.activated() + z.given_rows();
  return bytes;
}

ModuleCost encoder_module(const Sounds& z) {
  const auto rows = static_cast<double>(z.rows), bins = static_cast<double>(z.own.audio_mel_bins),
             h = static_cast<double>(z.layers.hidden_size), of_rank = rows / z.divided();
  ModuleCost cost{kAudioEncoder, z.begins() ? rows * 3 * h * (2 * bins + h) : 0.0};
  for (const LayerCost& layer : z.costs) {
    cost.weights += of_rank * layer.weight_products();
    cost.scores += of_rank * layer.score_products();
    cost.moved += of_rank * (layer.first.moved_elements + layer.second.moved_elements);
  }
  for (int64_t unit = 0; unit < z.again.units; ++unit)
    for (const LayerCost& layer : z.of_unit(unit)) cost.again += of_rank * layer.products();
  cost.weight_grads = cost.grads = z.trains_encoder;
  return cost;
}

ModuleCost projector_module(const Sounds& z) {
  const auto in = static_cast<double>(z.own.audio_feature_size()),
             out = static_cast<double>(z.language.hidden_size),
             middle = static_cast<double>(z.middle()), rows = static_cast<double>(z.features);
  ModuleCost cost{kAudioProjector, rows * (middle > 0 ? middle * (in + out) : in * out)};
  cost.moved = 5 * rows * middle;
  cost.weight_grads = z.trains_projector;
  cost.grads = z.trains();
  return cost;
}

// As that of images: of divided layers, or of features that are gathered.
Traffic tensor_traffic(const Sounds& z) {
  Traffic sent;
  const int64_t ranks = z.given.tensor;
  const auto features = static_cast<double>(z.given_rows());
  if (!z.own.divides_encoders()) {
    if (ranks == 1 || !z.places) return sent;
    const double one_way = scatter_bytes(ranks, features * static_cast<double>(ranks));
    return {one_way, z.trains() && z.given.sequence_parallel ? one_way : 0};
  }
  for (const LayerCost& layer : z.costs) {
    sent.forward += layer.tensor().forward;
    if (z.trains_encoder) sent.backward += layer.tensor().backward;
  }
  for (int64_t unit = 0; unit < z.again.units; ++unit)
    for (const LayerCost& layer : z.of_unit(unit)) sent.backward += layer.tensor().forward;
  if (z.places && z.trains() && z.given.sequence_parallel)
    sent.backward += 2 * scatter_bytes(ranks, features);
  return sent;
}

}  // namespace

void add_sounds(const ModelConfig& config, const EndsShape& shape, EndsCost& cost) {
  const Sounds z(config, shape);
  if (!z.places && cost.modules.empty()) cost.embedding = {};  // another segment has it
  cost.media_rows = std::max(cost.media_rows, z.width());
  cost.media_features = std::max(cost.media_features, z.given_rows());
  if (!z.places && !z.part.is_there()) return;
  const int64_t images = cost.encoder + cost.features, encoder = saved_of_encoder(z),
                features = saved_of_features(z), saved = encoder + features;
  AllocationTrack forwards, backwards;
  run_forward(z, forwards);
  run_backward(z, backwards);
  EndCost& end = cost.embedding;
  const int64_t most = std::max(images, saved);
  end.forward_peak = std::max(images + end.forward_peak, forwards.most()) - most;
  end.backward_peak = std::max(images + end.backward_peak, saved + backwards.most()) - most;
  end.saved += most - images;
  if (saved > images) cost.encoder = encoder, cost.features = features;
  end.pending = std::max(end.pending, pending_of(z));
  const int64_t frames = z.begins() ? z.frames() * z.shape.sum : 0,
                of_row = 3 * kPlace + z.shape.sum + kSegment,
                of_features = z.features + (z.ranks > 1 ? 2 : 1) * z.placed();
  cost.media = std::max(cost.media, frames + z.rows * of_row + kPlace * of_features);
  end.tensor += tensor_traffic(z);
  if (z.places && z.given.context > 1) {
    const double one_way =
        scatter_bytes(z.given.context, static_cast<double>(z.given_rows() * z.ranks));
    end.context += {one_way, z.trains() ? one_way : 0};
  }
  if (z.part.is_there()) cost.modules.push_back(encoder_module(z));
  if (z.ends()) cost.modules.push_back(projector_module(z));
}

}  // namespace megatron
