#include "megatron/models/audio/audio_config.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/lora_modules.h"

namespace megatron {
namespace {

constexpr std::string_view kAudioModels[] = {"none", "whisper"};
constexpr std::string_view kAudioFeatures[] = {"mean", "stacked"};
constexpr std::string_view kAudioProjections[] = {"mlp", "affine"};
constexpr std::string_view kAudioActivations[] = {"gelu", "gelu_tanh", "quick_gelu", "silu"};

}  // namespace

void AudioConfig::fields(FieldVisitor& v) {
  v.group("audio");
  v.role(FieldRole::kArchitecture);
  v.choice("audio_model_type", audio_model_type, kAudioModels,
           "the encoder of sounds of a model that hears");
  v.field("audio_num_layers", audio_num_layers, "layers of the encoder of sounds");
  v.field("audio_hidden_size", audio_hidden_size, "width of the encoder of sounds");
  v.field("audio_ffn_hidden_size", audio_ffn_hidden_size, "width of its MLPs");
  v.field("audio_num_attention_heads", audio_num_attention_heads, "its heads");
  v.field("audio_mel_bins", audio_mel_bins, "filters of the log-mel features that it reads");
  v.choice("audio_features", audio_features, kAudioFeatures,
           "mean: two neighbouring rows of the encoder become one, of the length of the sound; "
           "stacked: four become one, side by side, of clips of 30 s");
  v.choice("audio_projection_type", audio_projection_type, kAudioProjections,
           "what makes rows of the language model of features: two linears or one");
  v.field("audio_projection_ffn_hidden_size", audio_projection_ffn_hidden_size,
          "width between the two linears; 0: hidden_size");
  v.field({"audio_projection_bias", "--disable-audio-projection-bias", true}, audio_projection_bias,
          "no biases in these linears");
  v.choice("audio_projection_activation", audio_projection_activation, kAudioActivations,
           "between the two linears");
}

void AudioConfig::validate(Violations& v) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " is ", value), "a positive number");
    return value > 0;
  };
  positive("--audio-num-layers", audio_num_layers);
  positive("--audio-ffn-hidden-size", audio_ffn_hidden_size);
  positive("--audio-mel-bins", audio_mel_bins);
  if (positive("--audio-hidden-size", audio_hidden_size)) {
    v.require(audio_hidden_size % 2 == 0 && audio_hidden_size >= 4,
              cat("--audio-hidden-size ", audio_hidden_size,
                  ": positions are sines and cosines, as many of each"),
              "an even number from 4 on");
    if (positive("--audio-num-attention-heads", audio_num_attention_heads))
      v.require(audio_hidden_size % audio_num_attention_heads == 0,
                cat("--audio-hidden-size ", audio_hidden_size,
                    " is not divisible by --audio-num-attention-heads ", audio_num_attention_heads),
                cat("heads that divide it: ", format_divisors(audio_hidden_size)));
  }
  v.require(audio_projection_activation != VisionActivation::kSilu,
            "--audio-projection-activation silu is not built", "gelu, gelu_tanh or quick_gelu");
  v.require(audio_projection_ffn_hidden_size >= 0,
            cat("--audio-projection-ffn-hidden-size is ", audio_projection_ffn_hidden_size),
            "0 or more");
}

int64_t AudioConfig::sound_rows(int64_t frames) const {
  if (!stacks()) return (frames + 1) / 2;
  constexpr int64_t kFrames = 2 * kAudioRows;  // of a clip
  return (frames + kFrames - 1) / kFrames * kAudioRows;
}

TransformerConfig AudioConfig::audio_encoder(const TransformerConfig& language) const {
  TransformerConfig t;
  t.num_layers = audio_num_layers;
  t.hidden_size = audio_hidden_size;
  t.ffn_hidden_size = audio_ffn_hidden_size;
  t.num_attention_heads = audio_num_attention_heads;
  t.seq_length = t.max_position_embeddings = kAudioRows;
  t.position_embedding_type = PositionEmbedding::kNone;  // its own table, before the layers
  t.layernorm_epsilon = 1e-5;
  t.bias_gelu_fusion = false;
  t.hidden_dropout = t.attention_dropout = 0.0;
  t.causal = false;
  t.keys_with_bias = false;
  t.init_method_std = language.init_method_std;
  t.seed = language.seed;
  t.attention_backend = language.attention_backend;
  t.fast = language.fast;
  take_adapters(language, "audio_model.", t);
  t.finalize();
  return t;
}

}  // namespace megatron
