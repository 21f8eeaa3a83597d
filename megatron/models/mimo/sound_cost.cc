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
#include <utility>
#include <vector>

#include "megatron/models/mimo/encoder_cost.h"

namespace megatron {
namespace {

constexpr int64_t kPlace = 8, kSegment = 5 * kPlace;  // bytes of an index, of a row of UnpaddedRows

// Sizes of the worst micro-batch.
struct Sounds : EncoderCost {
  Sounds(const ModelConfig& config, const EndsShape& of)
      : Sounds(config.own.as_or_default<MimoConfig>(), config, of) {}

  Sounds(const MimoConfig& media, const ModelConfig& config, const EndsShape& of)
      : EncoderCost(media, media.keeping(media.audio_encoder(config.transformer)),
                    {"audio_model.", "audio_projection.", media.audio_projection_type,
                     media.audio_projection_ffn_hidden_size, media.audio_feature_size()},
                    config, of) {
    const int64_t s = std::max<int64_t>(1, language.seq_length),
                  of_clip = kAudioRows / own.rows_of_a_feature();
    // Of a sequence so many clips, of so many features
    const int64_t clips_of_sequence =
        own.stacks() ? std::max<int64_t>(1, s / of_clip) : (s + of_clip - 1) / of_clip;
    const int64_t one = own.stacks() ? of_clip : s / clips_of_sequence;
    all = given.samples * clips_of_sequence * one;
    clips = (given.samples * clips_of_sequence + ranks - 1) / ranks;
    features = clips * one;
    rows = features * own.rows_of_a_feature();
    set_samples(clips);
    TransformerConfig of_layer = layers;
    of_layer.seq_length = rows / std::max<int64_t>(1, clips);
    for (int64_t layer = part.first + 1; layer <= part.first + part.count; ++layer)
      costs.push_back(transformer_layer_cost(of_layer, layer, shape, offloads(layer)));
  }

  int64_t placed() const { return std::min(all, given.tokens); }
  // Bytes
  int64_t frames() const { return (2 * rows + 2 * clips) * own.audio_mel_bins; }  // numbers
  int64_t around_frames() const { return 6 * rows * own.audio_mel_bins * shape.element; }
  int64_t means() const {  // of neighbouring rows
    return own.stacks() ? 0 : features * layers.hidden_size * shape.element;
  }
  int64_t borders() const { return shape.element != shape.sum ? rows * shape.element : 0; }
  int64_t convolved() const { return around_frames() + 6 * width() + borders(); }
  int64_t norm() const {
    if (own.stacks()) return width() + 2 * rows * shape.sum;
    return means() + 2 * features * (shape.sum + kPlace);
  }

  int64_t all = 0;    // features of all ranks
  int64_t clips = 0;  // of one
};

int64_t saved_of_encoder(const Sounds& z) {
  if (!z.trains_encoder) return 0;
  return (z.begins() ? z.convolved() : 0) + (z.ends() ? z.norm() : 0) + z.layers_saved();
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

// From frames, or what the segment before gives, to the output of the last layer here.
void encode(const Sounds& z, AllocationTrack& track) {
  track.take(z.leaving_before());
  if (z.begins())
    convolve(z, track);
  else
    track.take(z.arrived());
  track.give(z.leaving_before());
  if (z.part.is_there()) z.forward_layers(track);
}

// From there to features.
void give_features(const Sounds& z, AllocationTrack& track) {
  track.take(2 * z.means());  // neighbours
  track.take(z.norm() + z.read());
  track.give(z.width() + 2 * z.means());
  if (!z.trains_encoder) track.give(z.norm());
}

// To the projected features.
void project(const Sounds& z, AllocationTrack& track) {
  give_features(z, track);
  track.take(2 * z.activated() + z.given_rows());
  if (!z.trains()) track.give(z.read() + 2 * z.activated());
}

// From frames, or what the segment before gives, to rows of the first layer of the language model,
// or what the segment gives; ends with what is saved.
void run_forward(const Sounds& z, AllocationTrack& track) {
  encode(z, track);
  if (z.ends()) project(z, track);
  if (!z.places) return;
  z.gather_features(track);
  track.take(kPlace * z.placed());
  track.take(2 * z.of_sequences());
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
  track.take(z.reloading());
  if (z.places) z.backward_places(track);
  if (z.ends()) unproject(z, track);
  if (!z.trains_encoder || !z.part.is_there()) return;
  z.backward_layers(track);
  if (z.begins()) track.touch(5 * z.width());  // of three rows each, and of the rows before
}

// Held by the linears between the passes I and W.
int64_t pending_of(const Sounds& z) {
  int64_t bytes = 0;
  if (z.trains_encoder) {
    if (z.begins()) bytes += z.around_frames() + 6 * z.width();
    bytes += z.layers_pending();
  }
  if (z.trains_projector && z.ends()) bytes += z.read() + 2 * z.activated() + z.given_rows();
  return bytes;
}

ModuleCost module_of_encoder(const Sounds& z) {
  const auto rows = static_cast<double>(z.rows), bins = static_cast<double>(z.own.audio_mel_bins),
             h = static_cast<double>(z.layers.hidden_size);
  return z.encoder_module(z.begins() ? rows * 3 * h * (2 * bins + h) : 0.0);
}

int64_t host_bytes(const std::vector<OffloadedBytes>& halves) {
  int64_t bytes = 0;
  for (const OffloadedBytes& half : halves) bytes += half.taken;
  return bytes;
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
  AllocationTrack forwards, backwards, alone;
  run_forward(z, forwards);
  encode(z, alone);
  if (z.ends()) give_features(z, alone);
  z.add_ahead(alone, cost);
  run_backward(z, backwards);
  EndCost& end = cost.embedding;
  const int64_t most = std::max(images, saved);
  end.forward_peak = std::max(images + end.forward_peak, forwards.most()) - most;
  end.backward_peak = std::max(images + end.backward_peak, saved + backwards.most()) - most;
  end.saved += most - images;
  if (saved > images) cost.encoder = encoder, cost.features = features;
  std::vector<OffloadedBytes> offloaded = z.offloaded();
  if (host_bytes(offloaded) > host_bytes(cost.offloaded)) cost.offloaded = std::move(offloaded);
  end.pending = std::max(end.pending, pending_of(z));
  const int64_t frames = z.begins() ? z.frames() * z.shape.sum : 0,
                of_row = 3 * kPlace + z.shape.sum + kSegment,
                of_features = z.features + (z.ranks > 1 ? 2 : 1) * z.placed();
  cost.media = std::max(cost.media, frames + z.rows * of_row + kPlace * of_features);
  z.add_traffic(end);
  if (z.part.is_there()) cost.modules.push_back(module_of_encoder(z));
  if (z.ends()) cost.modules.push_back(z.projector_module());
}

}  // namespace megatron
