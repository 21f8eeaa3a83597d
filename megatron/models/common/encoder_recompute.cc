#include "megatron/models/common/encoder_recompute.h"

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kEncoderGranularities[] = {"none", "full"};
constexpr std::string_view kEncoderMethods[] = {"uniform", "block"};

}  // namespace

void EncoderRecompute::fields(FieldVisitor& v) {
  v.group("encoders of media");
  v.role(FieldRole::kMachine);
  v.choice("encoder_recompute_granularity", encoder_recompute_granularity, kEncoderGranularities,
           "recompute whole layers of the encoders of images and sounds in the backward");
  v.choice("encoder_recompute_method", encoder_recompute_method, kEncoderMethods,
           "which of their layers");
  v.field("encoder_recompute_num_layers", encoder_recompute_num_layers,
          "uniform: layers per recomputed unit; block: number of layers recomputed");
  v.field("recompute_vision", recompute_vision, "short for --encoder-recompute-granularity full");
}

void EncoderRecompute::validate(Violations& v, int64_t layers) const {
  v.require(
      encoder_recompute_num_layers > 0 && (encoder_recompute_num_layers <= layers || layers <= 0),
      cat("--encoder-recompute-num-layers ", encoder_recompute_num_layers, ": expected 1 to ",
          layers));
}

TransformerConfig EncoderRecompute::recomputing(TransformerConfig layers) const {
  if (!recomputes_encoders()) return layers;
  layers.recompute_granularity = RecomputeGranularity::kFull;
  layers.recompute_method = encoder_recompute_method;
  layers.recompute_num_layers = encoder_recompute_num_layers;
  return layers;
}

}  // namespace megatron
