// What a model that sees has besides its language model: the encoder of images and the projector of
// its features.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

enum class VisionModel { kNone, kClip, kInternVit };
enum class VisionActivation { kGelu, kGeluTanh, kQuickGelu };
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
  VisionProjection vision_projection_type = VisionProjection::kMlp;
  int64_t vision_projection_ffn_hidden_size = 0;  // of mlp; 0: the width of the language model
  bool vision_projection_bias = true;
  bool vision_projection_norm = false;  // LayerNorm of what mlp reads
  VisionActivation vision_projection_activation = VisionActivation::kGelu;

  void fields(FieldVisitor& visitor);
  void validate(Violations& violations) const;

  bool is_given() const { return vision_model_type != VisionModel::kNone; }
  int64_t patch_rows() const { return img_h / patch_dim; }
  int64_t patch_columns() const { return img_w / patch_dim; }
  int64_t patches() const { return patch_rows() * patch_columns(); }  // of a picture
  // Rows of a picture in the encoder, with its class row.
  int64_t encoder_rows() const { return patches() + 1; }
  // Features of a picture: the number of tokens that it becomes.
  int64_t features() const {
    return patches() / (pixel_shuffle ? 4 : 1) + (vision_class_token ? 1 : 0);
  }
  int64_t feature_size() const { return vision_hidden_size * (pixel_shuffle ? 4 : 1); }
  // Of InternViT: a bias of the patches and factors of the branches, no norm before the layers.
  bool is_internvit() const { return vision_model_type == VisionModel::kInternVit; }
  // Of the encoder's layers; seeds, deviations and the choice of kernels are the language model's.
  TransformerConfig encoder(const TransformerConfig& language) const;
};

Activation activation_of(VisionActivation activation);

}  // namespace megatron
