// What encoders of images and of sounds cost alike on a rank, for their worst legal micro-batch:
// layers, projector, and the gathering of features. What comes before the layers and behind them is
// the encoder's own (mimo_cost.cc, sound_cost.cc, which also say the letters).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megatron/models/common/encoder_part.h"
#include "megatron/models/common/ends_cost.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model.h"
#include "megatron/transformer/layer/offloaded_halves.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {

struct EncoderCost {
  struct Projector {
    const char *encoder, *name;  // of the modules
    VisionProjection type;
    int64_t ffn_hidden_size = 0, feature_size = 0;
  };

  EncoderCost(MimoConfig config_of_media, TransformerConfig layers_of_encoder,
              const Projector& its_projector, const ModelConfig& config, const EndsShape& of);

  // The layers of recomputed unit `unit`.
  std::span<const LayerCost> of_unit(int64_t unit) const;
  // Those that are not recomputed
  std::span<const LayerCost> recorded() const;
  // Whether what layer `layer` saves goes to host memory.
  bool offloads(int64_t layer) const {
    return trains_encoder && layers.offloads_activations() && layer - part.first > again.layers;
  }
  std::vector<OffloadedBytes> offloaded() const;  // as EndsCost::offloaded
  OffloadedHalves halves() const;
  // In transfer to the host since the micro-batch before, until this one's layers begin
  int64_t leaving_before() const { return places ? 0 : halves().leaving_at_the_end(); }
  // While what is behind the last layer runs backward
  int64_t reloading() const { return halves().reloading_at_the_end(); }

  int64_t middle() const;  // width of the projector; 0: it is one linear
  // Bytes
  int64_t width() const { return rows * layers.hidden_size * shape.element; }
  int64_t read() const { return features * projector.feature_size * shape.element; }
  int64_t activated() const { return features * middle() * shape.element; }
  int64_t given_rows() const { return features * language.hidden_size * shape.element; }
  int64_t of_sequences() const {
    return given.tokens * language.hidden_size * shape.element;  // [s, b, h]
  }
  // What the segment before gives; where nothing saves it, it is held besides what is made of it.
  int64_t arrived() const;
  int64_t layers_saved() const;    // on the device
  int64_t layers_pending() const;  // between the passes I and W

  bool begins() const { return part.is_there() && part.begins; }
  bool ends() const { return part.is_there() && part.ends; }  // and the projector
  bool trains() const { return trains_encoder || trains_projector; }

  // From the input of the part's first layer to the output of its last one, and back, which begins
  // with reloading() allocated.
  void forward_layers(AllocationTrack& track) const;
  void backward_layers(AllocationTrack& track) const;
  // To features of all ranks.
  void gather_features(AllocationTrack& track) const;
  // From the gradient of the first layer's input to that of the projected features.
  void backward_places(AllocationTrack& track) const;

  // `before`: products of what comes before the layers.
  ModuleCost encoder_module(double before) const;
  ModuleCost projector_module() const;
  // Of an encoder that is ahead; `forward`: its own work, from pixels or frames to features.
  void add_ahead(const AllocationTrack& forward, EndsCost& cost) const;
  // Of gathered features, and within divided layers.
  void add_traffic(EndCost& cost) const;

  const MimoConfig own;
  const TransformerConfig& language;
  const TransformerConfig layers;
  const Projector projector;
  const LayerShape& given;
  const EncoderPart part;  // of the segment
  const bool places;       // features become tokens on it
  const bool trains_encoder, trains_projector;
  const bool apart;                // encoders have ranks of their own
  const int64_t ranks;             // that divide media: of tp and cp, or the encoders' own
  int64_t rows = 0, features = 0;  // of one of them
  LayerShape shape;                // of the encoder's layers
  std::vector<LayerCost> costs;    // of the part's layers
  RecomputedLayers again;

 protected:
  // Sets `shape` for so many samples, of `rows` rows together.
  void set_samples(int64_t samples);

 private:
  Traffic divided_traffic() const;
};

}  // namespace megatron
