#include "megatron/models/mimo/mimo_config.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/models/common/feature_projector.h"

namespace megatron {

void MimoConfig::fields(FieldVisitor& v) {
  VisionConfig::fields(v);
  v.field("image_token_id", image_token_id,
          "id of the token that stands where a feature of an image comes in");
  v.field("bidirectional_images", bidirectional_images,
          "tokens of an image attend to all tokens of the image, those behind them too (Gemma 3)");
  AudioConfig::fields(v);
  v.field("audio_token_id", audio_token_id,
          "id of the token that stands where a feature of a sound comes in");
  EncoderRecompute::fields(v);
  EncoderOffload::fields(v);
  EncoderPrefetch::fields(v);
  v.field("encoder_tensor_model_parallel_size", encoder_tensor_model_parallel_size,
          "tensor ranks that divide the layers of the encoders of images and sounds: those of the "
          "language model, or 1: each has all of them, and encodes images and sounds of its own; "
          "any number where encoders have ranks of their own");
  v.field("encoder_data_parallel_size", encoder_data_parallel_size,
          "encoders of images and sounds have ranks of their own, the first ones of the job: so "
          "many, times --encoder-tensor-model-parallel-size, divide the images and sounds of a "
          "micro-batch of all data-parallel ranks of the language model; 0: they are on its ranks");
}

void MimoConfig::validate(Violations& v) const {
  VisionConfig::validate(v);
  AudioConfig::validate(v);
  EncoderRecompute::validate(
      v, std::max(sees() ? vision_num_layers : 0, hears() ? audio_num_layers : 0));
  EncoderOffload::validate(v, *this);
  EncoderPrefetch::validate(v);
  v.require(encoder_data_parallel_size >= 0,
            cat("--encoder-data-parallel-size is ", encoder_data_parallel_size), "0 or more");
  v.require(audio_token_id >= 0, cat("--audio-token-id is ", audio_token_id), "0 or more");
  v.require(!sees() || !hears() || image_token_id != audio_token_id,
            cat("--image-token-id and --audio-token-id are ", image_token_id), "ids of two tokens");
  v.require(image_token_id >= 0, cat("--image-token-id is ", image_token_id), "0 or more");
}

TransformerConfig MimoConfig::part(const TransformerConfig& language,
                                   std::string_view parameter) const {
  if (parameter.starts_with("vision_model.")) return encoder(language);
  if (parameter.starts_with("audio_model.")) return audio_encoder(language);
  for (const std::string_view module : {"vision_projection.", "audio_projection."})
    if (parameter.starts_with(module)) return projector_adapters(language, module);
  return language;
}

}  // namespace megatron
