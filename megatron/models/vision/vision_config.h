// What a model that sees has besides its language model: the encoder of images and the projector of
// its features.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

enum class VisionModel { kNone, kClip, kInternVit, kSiglip, kQwen2, kQwen25 };
// kSilu: of the gate of a gated MLP
enum class VisionActivation { kGelu, kGeluTanh, kQuickGelu, kSilu };
enum class VisionProjection { kMlp, kAffine };

// The defaults are those of CLIP ViT-L/14-336 up to its last layer but one, whose output LLaVA
// takes.
struct VisionConfig {
  VisionModel vision_model_type = VisionModel::kNone;
  // Layers that are computed: those behind the one whose output is taken are no part of the model
  int64_t vision_num_layers = 23;
  int64_t vision_hidden_size = 1024;
  int64_t vision_ffn_hidden_size = 4096;
  int64_t vision_num_attention_heads = 16;
  double vision_layernorm_epsilon = 1e-5;
  VisionActivation vision_activation = VisionActivation::kQuickGelu;
  int64_t img_h = 336, img_w = 336;  // of a picture
  int64_t patch_dim = 14;            // p: side of a patch
  bool vision_class_token = true;    // whether its output is among the features of a picture
  bool vision_qkv_bias = true;       // biases of queries, keys and values
  bool vision_newlines = false;      // the vector image_newline ends each row of an image's tiles
  bool pixel_shuffle = false;        // four neighbouring features become one
  // Of Qwen 2.5: side in pixels of the windows within which patches attend, cut at the borders of a
  // picture; and the layers, from 0, in which they attend to all of it
  int64_t vision_window_size = 0;
  std::vector<int64_t> vision_whole_picture_layers;
  int64_t vision_pooling = 1;  // k: k x k neighbouring features become their mean
  VisionProjection vision_projection_type = VisionProjection::kMlp;
  int64_t vision_projection_ffn_hidden_size = 0;  // of mlp; 0: the width of the language model
  bool vision_projection_bias = true;
  // Norm of what is read: of mlp a LayerNorm; of affine, as in Gemma 3, an RMSNorm whose weights
  // are factors minus 1, with the epsilon of the encoder
  bool vision_projection_norm = false;
  VisionActivation vision_projection_activation = VisionActivation::kGelu;

  void fields(FieldVisitor& visitor);
  void validate(Violations& violations) const;

  bool is_given() const { return vision_model_type != VisionModel::kNone; }
  int64_t patch_rows() const { return img_h / patch_dim; }
  int64_t patch_columns() const { return img_w / patch_dim; }
  int64_t patches() const { return patch_rows() * patch_columns(); }  // of a picture
  // Neither SigLIP nor the encoders of Qwen have a class row.
  bool has_class_row() const { return is_clip() || is_internvit(); }
  // Rows of a picture in the encoder.
  int64_t encoder_rows() const { return patches() + (has_class_row() ? 1 : 0); }
  // Sides of a picture, in features.
  int64_t feature_rows() const { return patch_rows() / cell_side(); }
  int64_t feature_columns() const { return patch_columns() / cell_side(); }
  // Features of a picture: the number of tokens that it becomes.
  int64_t features() const {
    return feature_rows() * feature_columns() + (vision_class_token ? 1 : 0);
  }
  int64_t feature_size() const { return vision_hidden_size * (pixel_shuffle ? 4 : 1); }
  // Patches along a side of a feature.
  int64_t cell_side() const { return pixel_shuffle ? 2 : vision_pooling; }
  // Of InternViT: factors of the branches. Of CLIP: a norm before the layers, patches without bias.
  bool is_internvit() const { return vision_model_type == VisionModel::kInternVit; }
  bool is_clip() const { return vision_model_type == VisionModel::kClip; }
  bool is_siglip() const { return vision_model_type == VisionModel::kSiglip; }
  // Of Qwen 2 and 2.5: pictures of their own sizes, whose patches come in blocks of two by two that
  // become one feature; rotary positions; img_h and img_w are no limits.
  bool has_own_sizes() const { return vision_model_type == VisionModel::kQwen2 || has_windows(); }
  // Of Qwen 2.5: windows, RMSNorm and a gated MLP.
  bool has_windows() const { return vision_model_type == VisionModel::kQwen25; }
  int64_t window_side() const { return vision_window_size / (2 * patch_dim); }  // in features
  bool has_last_norm() const { return is_siglip() || has_own_sizes(); }
  // Numbers of a patch: three channels, and of Qwen a still image twice.
  int64_t patch_elements() const { return 3 * frames() * patch_dim * patch_dim; }
  int64_t frames() const { return has_own_sizes() ? 2 : 1; }
  // Of the encoder's layers; seeds, deviations and the choice of kernels are the language model's.
  TransformerConfig encoder(const TransformerConfig& language) const;

 private:
  void validate_windows(Violations& v, const std::string& type) const;
};

Activation activation_of(VisionActivation activation);

}  // namespace megatron
