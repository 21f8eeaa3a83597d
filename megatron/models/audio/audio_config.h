// What a model that hears has besides its language model: the encoder of sounds and the projector
// of its features.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/models/vision/vision_config.h"

namespace megatron {

enum class AudioModel { kNone, kWhisper };
// What features are made of: the means of two neighbouring rows of the encoder, from the rows of
// the sound alone (Qwen 2 Audio), or four rows side by side, from clips of 30 s (Voxtral).
enum class AudioFeatures { kMean, kStacked };

// The defaults are those of Qwen 2 Audio.
struct AudioConfig {
  AudioModel audio_model_type = AudioModel::kNone;
  int64_t audio_num_layers = 32;
  int64_t audio_hidden_size = 1280;
  int64_t audio_ffn_hidden_size = 5120;
  int64_t audio_num_attention_heads = 20;
  int64_t audio_mel_bins = 128;
  AudioFeatures audio_features = AudioFeatures::kMean;
  VisionProjection audio_projection_type = VisionProjection::kAffine;
  int64_t audio_projection_ffn_hidden_size = 0;  // of mlp; 0: the width of the language model
  bool audio_projection_bias = true;
  VisionActivation audio_projection_activation = VisionActivation::kGelu;

  void fields(FieldVisitor& visitor);
  void validate(Violations& violations) const;

  bool hears() const { return audio_model_type != AudioModel::kNone; }
  bool stacks() const { return audio_features == AudioFeatures::kStacked; }
  int64_t audio_feature_size() const { return audio_hidden_size * (stacks() ? 4 : 1); }
  // Rows that become a feature.
  int64_t rows_of_a_feature() const { return stacks() ? 4 : 2; }
  // Rows of a sound in the encoder, and its features, the number of tokens that it becomes.
  // `frames`: that show any of its samples (media/log_mel.h).
  int64_t sound_rows(int64_t frames) const;
  int64_t sound_features(int64_t frames) const { return sound_rows(frames) / rows_of_a_feature(); }
  // Of the encoder's layers; seeds, deviations and the choice of kernels are the language model's.
  TransformerConfig audio_encoder(const TransformerConfig& language) const;
};

inline constexpr int64_t kAudioRows = 1500;  // of a clip of 30 s: two frames each

}  // namespace megatron
