#include "megatron/models/vision/vision_config.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/lora_modules.h"

namespace megatron {
namespace {

constexpr std::string_view kVisionModels[] = {"none",   "clip",  "internvit",
                                              "siglip", "qwen2", "qwen2_5"};
constexpr std::string_view kVisionActivations[] = {"gelu", "gelu_tanh", "quick_gelu", "silu"};
constexpr std::string_view kVisionProjections[] = {"mlp", "affine"};

}  // namespace

void VisionConfig::fields(FieldVisitor& v) {
  v.group("vision");
  v.role(FieldRole::kArchitecture);
  v.choice("vision_model_type", vision_model_type, kVisionModels,
           "the encoder of images of a model that sees");
  v.field("vision_num_layers", vision_num_layers,
          "layers of the encoder that are computed, up to the one whose output is taken");
  v.field("vision_hidden_size", vision_hidden_size, "width of the encoder of images");
  v.field("vision_ffn_hidden_size", vision_ffn_hidden_size, "width of its MLPs");
  v.field("vision_num_attention_heads", vision_num_attention_heads, "its heads");
  v.field("vision_layernorm_epsilon", vision_layernorm_epsilon,
          "added to the variance in its norms");
  v.choice("vision_activation", vision_activation, kVisionActivations, "of its MLPs; silu: gated");
  v.field("img_h", img_h, "height of a picture that the encoder reads");
  v.field("img_w", img_w, "its width");
  v.field("patch_dim", patch_dim, "side of a patch");
  v.field({"vision_class_token", "--disable-vision-class-token", true}, vision_class_token,
          "the output of the class token is no feature of a picture");
  v.field({"vision_qkv_bias", "--disable-vision-qkv-bias", true}, vision_qkv_bias,
          "no biases of queries, keys and values in the encoder");
  v.field("pixel_shuffle", pixel_shuffle, "two by two neighbouring features become one");
  v.field("vision_window_size", vision_window_size,
          "side in pixels of the windows within which patches attend (qwen2_5)");
  v.field("vision_whole_picture_layers", vision_whole_picture_layers,
          "numbers, from 0, of the layers in which they attend to the whole picture (qwen2_5)");
  v.field("vision_pooling", vision_pooling,
          "so many neighbouring features along each side become one, their mean");
  v.field("vision_newlines", vision_newlines,
          "a vector of its own ends each row of the tiles of an image (LLaVA-NeXT)");
  v.choice("vision_projection_type", vision_projection_type, kVisionProjections,
           "what makes rows of the language model of features: two linears or one");
  v.field("vision_projection_ffn_hidden_size", vision_projection_ffn_hidden_size,
          "width between the two linears; 0: hidden_size");
  v.field({"vision_projection_bias", "--disable-vision-projection-bias", true},
          vision_projection_bias, "no biases in these linears");
  v.field("vision_projection_norm", vision_projection_norm,
          "norm of what the projector reads: a LayerNorm of mlp, Gemma 3's RMSNorm of affine");
  v.choice("vision_projection_activation", vision_projection_activation, kVisionActivations,
           "between the two linears");
}

void VisionConfig::validate(Violations& v) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " is ", value), "a positive number");
    return value > 0;
  };
  positive("--vision-num-layers", vision_num_layers);
  positive("--vision-ffn-hidden-size", vision_ffn_hidden_size);
  if (positive("--vision-hidden-size", vision_hidden_size) &&
      positive("--vision-num-attention-heads", vision_num_attention_heads))
    v.require(vision_hidden_size % vision_num_attention_heads == 0,
              cat("--vision-hidden-size ", vision_hidden_size,
                  " is not divisible by --vision-num-attention-heads ", vision_num_attention_heads),
              cat("heads that divide it: ", format_divisors(vision_hidden_size)));
  if (positive("--patch-dim", patch_dim) && positive("--img-h", img_h) &&
      positive("--img-w", img_w)) {
    v.require(img_h % patch_dim == 0 && img_w % patch_dim == 0,
              cat("a picture of --img-h ", img_h, " and --img-w ", img_w,
                  " is not divisible into patches of --patch-dim ", patch_dim));
    if (positive("--vision-pooling", vision_pooling))
      v.require(patch_rows() % vision_pooling == 0 && patch_columns() % vision_pooling == 0,
                cat("--vision-pooling ", vision_pooling, " of ", patch_rows(), " x ",
                    patch_columns(), " patches: it must divide both numbers"));
    v.require(!pixel_shuffle || (patch_rows() % 2 == 0 && patch_columns() % 2 == 0),
              cat("--pixel-shuffle of ", patch_rows(), " x ", patch_columns(),
                  " patches: both numbers must be even"));
  }
  v.require(!pixel_shuffle || !vision_class_token,
            "--pixel-shuffle with the class row among the features is not built",
            "--disable-vision-class-token");
  v.require(!is_given() || has_class_row() || !vision_class_token,
            cat("--vision-model-type ", kVisionModels[static_cast<size_t>(vision_model_type)],
                " has no class token"),
            "--disable-vision-class-token");
  const std::string type =
      cat("--vision-model-type ", kVisionModels[static_cast<size_t>(vision_model_type)]);
  v.require(!has_own_sizes() || pixel_shuffle, cat(type, " without --pixel-shuffle is not built"));
  validate_windows(v, type);
  v.require(!has_own_sizes() || vision_num_attention_heads <= 0 ||
                vision_hidden_size / vision_num_attention_heads % 4 == 0,
            cat(type, " with heads of ",
                vision_hidden_size / std::max<int64_t>(1, vision_num_attention_heads),
                ": rotary positions of rows and columns need a multiple of 4"));
  v.require(vision_pooling == 1 || !(vision_class_token || pixel_shuffle || vision_newlines),
            "--vision-pooling with the class row among the features, --pixel-shuffle or "
            "--vision-newlines is not built",
            "--disable-vision-class-token without them");
  v.require(
      !vision_newlines || !(vision_class_token || pixel_shuffle),
      "--vision-newlines with the class row among the features or --pixel-shuffle is not built",
      "--disable-vision-class-token without --pixel-shuffle");
  v.require(vision_layernorm_epsilon > 0,
            cat("--vision-layernorm-epsilon ", vision_layernorm_epsilon, " must be positive"));
  v.require(vision_projection_ffn_hidden_size >= 0,
            cat("--vision-projection-ffn-hidden-size is ", vision_projection_ffn_hidden_size),
            "0 or more");
}

void VisionConfig::validate_windows(Violations& v, const std::string& type) const {
  v.require((vision_activation == VisionActivation::kSilu) == has_windows() || !is_given(),
            "--vision-activation silu is for --vision-model-type qwen2_5, and needed for it");
  v.require(vision_projection_activation != VisionActivation::kSilu,
            "--vision-projection-activation silu is not built", "gelu, gelu_tanh or quick_gelu");
  if (!has_windows()) {
    v.require(
        vision_window_size == 0 && vision_whole_picture_layers.empty(),
        cat("--vision-window-size and --vision-whole-picture-layers have no effect with ", type),
        "--vision-model-type qwen2_5");
    return;
  }
  const int64_t feature = 2 * std::max<int64_t>(1, patch_dim);
  v.require(vision_window_size > 0 && vision_window_size % feature == 0,
            cat("--vision-window-size ", vision_window_size,
                " is not divisible into features of two by two patches of --patch-dim ", patch_dim),
            cat("a positive multiple of ", feature));
  std::vector<int64_t> layers = vision_whole_picture_layers;
  std::ranges::sort(layers);
  const auto refuse = [&](int64_t layer, const std::string& why) {
    v.add(cat("--vision-whole-picture-layers has ", layer, why),
          cat("each of 0 to ", vision_num_layers - 1, " at most once"));
  };
  for (const int64_t layer : layers)
    if (layer < 0 || layer >= vision_num_layers)
      return refuse(layer, cat(", the encoder has ", vision_num_layers, " layers"));
  const auto twice = std::ranges::adjacent_find(layers);
  if (twice != layers.end()) refuse(*twice, " twice");
}

TransformerConfig VisionConfig::encoder(const TransformerConfig& language) const {
  TransformerConfig t;
  t.num_layers = vision_num_layers;
  t.hidden_size = vision_hidden_size;
  t.ffn_hidden_size = vision_ffn_hidden_size;
  t.num_attention_heads = vision_num_attention_heads;
  t.seq_length = t.max_position_embeddings = encoder_rows();
  t.position_embedding_type = PositionEmbedding::kNone;  // its own table, before the layers
  if (has_own_sizes()) {
    t.position_embedding_type = PositionEmbedding::kRope;
    const int64_t section = vision_hidden_size / vision_num_attention_heads / 4;
    t.mrope_section = {section, section};  // of rows, of columns
    t.sections_begin_anew = true;
  }
  if (has_windows()) {
    t.normalization = Normalization::kRMSNorm;
    t.swiglu = true;
    t.whole_sample_layers.emplace();
    for (const int64_t layer : vision_whole_picture_layers)
      t.whole_sample_layers->push_back(layer + 1);
  }
  t.layernorm_epsilon = vision_layernorm_epsilon;
  t.bias_gelu_fusion = false;
  t.openai_gelu = vision_activation == VisionActivation::kGeluTanh;
  t.quick_gelu = vision_activation == VisionActivation::kQuickGelu;
  t.hidden_dropout = t.attention_dropout = 0.0;
  t.causal = false;
  t.projects_with_bias = vision_qkv_bias;
  t.branch_scales = is_internvit();
  t.init_method_std = language.init_method_std;
  t.seed = language.seed;
  t.attention_backend = language.attention_backend;
  t.fast = language.fast;
  take_adapters(language, "vision_model.", t);
  t.finalize();
  return t;
}

Activation activation_of(VisionActivation activation) {
  switch (activation) {
    case VisionActivation::kGelu:
      return Activation::kGelu;
    case VisionActivation::kGeluTanh:
      return Activation::kGeluTanh;
    case VisionActivation::kQuickGelu:
      return Activation::kQuickGelu;
    case VisionActivation::kSilu:
      break;  // gated, of no projector
  }
  return Activation::kGelu;
}

}  // namespace megatron
