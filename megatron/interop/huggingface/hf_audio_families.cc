// Models that hear: Qwen 2 Audio and Voxtral.
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_multimodal.h"
#include "megatron/models/mimo/mimo_config.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

std::vector<int64_t> as_convolution_of_3(const std::vector<int64_t>& ours) {
  return {ours[0], ours[1] / 3, 3};
}

const HfRow kWhisper[] = {
    {.ours = "audio_model.conv1.weight",
     .theirs = {"audio_tower.conv1.weight"},
     .stored_shape = as_convolution_of_3},
    {"audio_model.conv1.bias", {"audio_tower.conv1.bias"}},
    {.ours = "audio_model.conv2.weight",
     .theirs = {"audio_tower.conv2.weight"},
     .stored_shape = as_convolution_of_3},
    {"audio_model.conv2.bias", {"audio_tower.conv2.bias"}},
    {"audio_model.position_embeddings.weight", {"audio_tower.embed_positions.weight"}},
    {"audio_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_@",
     {"audio_tower.layers.*.self_attn_layer_norm.@"}},
    {"audio_model.decoder.layers.*.self_attention.linear_qkv.weight",
     {"audio_tower.layers.*.self_attn.q_proj.weight",
      "audio_tower.layers.*.self_attn.k_proj.weight",
      "audio_tower.layers.*.self_attn.v_proj.weight"},
     HfLayout::kSeparateQKV},
    {"audio_model.decoder.layers.*.self_attention.linear_qkv.bias",
     {"audio_tower.layers.*.self_attn.q_proj.bias", "audio_tower.layers.*.self_attn.v_proj.bias"},
     HfLayout::kQueryValue},
    {"audio_model.decoder.layers.*.self_attention.linear_proj.@",
     {"audio_tower.layers.*.self_attn.out_proj.@"}},
    {"audio_model.decoder.layers.*.mlp.linear_fc1.layer_norm_@",
     {"audio_tower.layers.*.final_layer_norm.@"}},
    {"audio_model.decoder.layers.*.mlp.linear_fc1.@", {"audio_tower.layers.*.fc1.@"}},
    {"audio_model.decoder.layers.*.mlp.linear_fc2.@", {"audio_tower.layers.*.fc2.@"}},
    {"audio_model.ln_post.@", {"audio_tower.layer_norm.@"}}};

const HfRow kLinearProjector[] = {
    {"audio_projection.encoder.@", {"multi_modal_projector.linear.@"}}};

const HfRow kTwoLinearsProjector[] = {
    {"audio_projection.encoder.linear_fc1.@", {"multi_modal_projector.linear_1.@"}},
    {"audio_projection.encoder.linear_fc2.@", {"multi_modal_projector.linear_2.@"}}};

std::span<const HfRow> audio_language_rows() {
  static const std::vector<HfRow> rows =
      nested_rows({kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPreNorms, kHead});
  return rows;
}

constexpr TextDefaults kQwen2AudioText[] = {{"qwen2", 4096, 22016, 32, 32, 151936}};

void voxtral_text_defaults(HfFields& given, HfFields& full) {
  const auto fill = [&](std::string_view key, int64_t value) {
    value = given.find_integer(key).value_or(value);
    full.integer(key, value);
  };
  fill("num_key_value_heads", 8);
  fill("head_dim", 128);
  fill("max_position_embeddings", 131072);
  double epsilon = 0;
  given.number("rms_norm_eps", epsilon, 1e-5);
  full.number("rms_norm_eps", epsilon);
  if (given.part("rope_parameters") != "{}") return;
  double theta = 0;
  given.number("rope_theta", theta, 1e8);
  full.number("rope_theta", theta);
}
constexpr TextDefaults kVoxtralText[] = {
    {"llama", 3072, 8192, 30, 32, 131072, voxtral_text_defaults}};

// Keys of the encoder in the two families.
struct WhisperKeys {
  std::string_view type, width, layers, heads, ffn, drop;
};
constexpr WhisperKeys kQwen2AudioKeys = {"\"qwen2_audio_encoder\"", "d_model",
                                         "encoder_layers",          "encoder_attention_heads",
                                         "encoder_ffn_dim",         "encoder_layerdrop"};
constexpr WhisperKeys kVoxtralKeys = {"\"voxtral_encoder\"", "hidden_size",
                                      "num_hidden_layers",   "num_attention_heads",
                                      "intermediate_size",   "layerdrop"};

void whisper_fields(HfFields& f, AudioConfig& own, const WhisperKeys& keys) {
  const std::string part = f.part("audio_config"), name = cat(f.name(), ": audio_config");
  HfFields read(part, name), write = HfFields::writer(part);
  HfFields& audio = f.reading() ? read : write;
  audio.constant("model_type", keys.type);
  own.audio_model_type = AudioModel::kWhisper;
  audio.integer(keys.width, own.audio_hidden_size, 1280);
  audio.integer(keys.layers, own.audio_num_layers, 32);
  audio.integer(keys.heads, own.audio_num_attention_heads, 20);
  audio.integer(keys.ffn, own.audio_ffn_hidden_size, 5120);
  audio.integer("num_mel_bins", own.audio_mel_bins, 128);
  audio.constant("max_source_positions", cat(kAudioRows));
  audio.constant("activation_function", "\"gelu\"");
  audio.constant("scale_embedding", "false");
  for (const std::string_view key :
       {std::string_view("dropout"), std::string_view("attention_dropout"),
        std::string_view("activation_dropout"), keys.drop})
    audio.constant(key, "0.0");
  if (!f.reading()) f.set("audio_config", audio.text());
}

// The files of transformers 5 say in text_config alone whether the output layer is tied.
void audio_text_fields(HfFields& f, ModelConfig& c, const char* missing_type, TextTypes types) {
  constexpr const char* kTied = "tie_word_embeddings";
  const bool given = f.reading() || nlohmann::json::parse(f.text()).contains(kTied);
  text_fields(f, c, missing_type, types);
  if (!given && c.transformer.untie_embeddings_and_output_weights) f.erase(kTied);
}

void qwen2_audio_fields(HfFields& f, ModelConfig& c) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  audio_text_fields(f, c, "qwen2", kQwen2AudioText);
  whisper_fields(f, own, kQwen2AudioKeys);
  constexpr const char *kIndex = "audio_token_index", *kId = "audio_token_id";
  f.integer(f.find_integer(kId) ? kId : kIndex, own.audio_token_id, 151646);
  MEGATRON_CHECK(own.audio_features == AudioFeatures::kMean && own.audio_projection_bias &&
                     own.audio_projection_type == VisionProjection::kAffine,
                 "a qwen2_audio has features that are means of two rows (--audio-features mean), "
                 "and one linear with a bias as its projector");
}

void voxtral_fields(HfFields& f, ModelConfig& c) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  if (f.reading()) {
    own.audio_features = AudioFeatures::kStacked;
    own.audio_projection_type = VisionProjection::kMlp;
    own.audio_projection_bias = false;
  }
  audio_text_fields(f, c, "llama", kVoxtralText);
  whisper_fields(f, own, kVoxtralKeys);
  f.integer("audio_token_id", own.audio_token_id);
  activation_field(f, "projector_hidden_act", own.audio_projection_activation, "gelu");
  const int64_t middle = own.audio_projection_ffn_hidden_size;
  MEGATRON_CHECK(own.stacks() && own.audio_projection_type == VisionProjection::kMlp &&
                     !own.audio_projection_bias &&
                     (middle == 0 || middle == c.transformer.hidden_size),
                 "a voxtral has features of four rows (--audio-features stacked), and two linears "
                 "without biases as its projector, with the width of the language model between "
                 "them");
  MEGATRON_CHECK(own.audio_ffn_hidden_size == own.audio_feature_size(), f.name(),
                 ": audio_config: intermediate_size ", own.audio_ffn_hidden_size,
                 " is not four times hidden_size ", own.audio_hidden_size,
                 ": the projector reads features of four rows");
}

HfFamily audio_family(std::string_view type, std::string_view architecture,
                      std::span<const HfRow> projector, void (*fields)(HfFields&, ModelConfig&)) {
  return {.model_type = type,
          .architecture = architecture,
          .rows = {audio_language_rows(), kWhisper, projector},
          .preset = [](TransformerConfig&) {},
          .fields = fields,
          .prefix = "",
          .layers = "language_model.model.layers.*",
          .waived = {"language_model.model.layers.*.self_attn.rotary_emb.inv_freq"},
          .type = "mimo",
          .our_layers = "language_model.decoder.layers.*",
          // Of the modules of transformers 5, and of transformers 4 in parts
          .beginnings = {{"model.audio_tower.", "audio_tower."},
                         {"model.multi_modal_projector.", "multi_modal_projector."},
                         {"model.language_model.", "language_model.model."},
                         {"lm_head.", "language_model.lm_head."}},
          .part =
              [](const ModelConfig& c, std::string_view ours) {
                return c.own.as_or_default<MimoConfig>().part(c.transformer, ours);
              },
          .carried = [](HfFields&, const ModelConfig&) { return std::vector<std::string>(); }};
}

}  // namespace

std::vector<HfFamily> audio_hf_families() {
  return {audio_family("qwen2_audio", "Qwen2AudioForConditionalGeneration", kLinearProjector,
                       qwen2_audio_fields),
          audio_family("voxtral", "VoxtralForConditionalGeneration", kTwoLinearsProjector,
                       voxtral_fields)};
}

}  // namespace megatron
