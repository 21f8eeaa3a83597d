// What a GPT that reads other modalities beside text has besides its layers.
#pragma once

#include "megatron/models/audio/audio_config.h"
#include "megatron/models/common/encoder_offload.h"
#include "megatron/models/common/encoder_prefetch.h"
#include "megatron/models/vision/vision_config.h"

namespace megatron {

struct MimoConfig : Config, VisionConfig, AudioConfig, EncoderActivations, EncoderPrefetch {
  // I, the id of a token in whose place a feature of an image stands; it may lie outside of the
  // vocabulary
  int64_t image_token_id = 32000;
  int64_t audio_token_id = 151646;  // the same of a sound
  // Tokens of a run of I attend to all of the run, those behind them included (Gemma 3)
  bool bidirectional_images = false;
  // Of a sequence, at most, for plans; those of own sizes as if each had one feature. 0: as many as
  // it has room for. No flag: data limit it
  int64_t most_pictures = 0;
  // What is frozen as a whole on every stage; no flags
  bool frozen_vision = false, frozen_vision_projection = false;
  bool frozen_audio = false, frozen_audio_projection = false;
  // 1: each tensor rank has the encoders whole and encodes images and sounds of its own. The tensor
  // ranks of the language model: these divide the encoders' layers as they do its own
  int64_t encoder_tensor_model_parallel_size = 1;
  // With ranks of the encoders' own (EncoderRanks), of which the size above is one of two factors,
  // the other one; 0: encoders are on ranks of the language model
  int64_t encoder_data_parallel_size = 0;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  bool sees() const { return VisionConfig::is_given(); }
  bool encodes_apart() const { return encoder_data_parallel_size > 0; }
  bool divides_encoders() const { return encoder_tensor_model_parallel_size > 1; }
  // Of the module of a parameter ("vision_model.conv1.weight"): its layers; of a projector
  // those of the language model with its adapters.
  TransformerConfig part(const TransformerConfig& language, std::string_view parameter) const;
};

}  // namespace megatron
