// What a layer is made of besides attention and MLP: norms, biases, the residual stream.
#pragma once

#include <string>
#include <string_view>

#include "megatron/tensor/norm.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

// Where a layer normalises: the input of each sublayer, its output before the residual add, or
// both.
enum class NormPlacement { kPre, kPost, kSandwich };

struct LayerConfig {
  Normalization normalization = Normalization::kLayerNorm;
  double layernorm_epsilon = 1e-5;
  bool layernorm_zero_centered_gamma = false;
  bool norm_bias = true;  // of LayerNorms
  bool add_bias_linear = true;
  bool add_qkv_bias = false;
  // Not a flag: an encoder of images has no biases of queries, keys and values beside others
  bool projects_with_bias = true;
  // Not a flag: of queries, keys and values beside biases only keys have none (Whisper). Theirs are
  // zeros of the one vector of all
  bool keys_with_bias = true;
  // Not a flag: the output of each sublayer is multiplied by a vector of its own (InternViT)
  bool branch_scales = false;
  bool qk_layernorm = false;
  bool qk_layernorm_over_heads = false;  // one RMS over all heads of a token, not one per head
  NormPlacement norm_placement = NormPlacement::kPre;
  bool first_input_norm = true;    // of the input of the first layer's attention
  bool parallel_residual = false;  // x + attention(norm(x)) + mlp(norm(x))
  bool scale_embeddings = false;   // by sqrt(hidden_size)
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;  // of the output of each sublayer, before the residual add
  double hidden_dropout = 0.1;
  // Kinds of the layers by their letters (transformer/layer_kinds.h), separated by commas, over and
  // over from the first layer on. Empty: attention and MLP. No flag yet: there are no other kinds
  std::string layer_pattern;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // The letters of a layer, which counts from 1.
  std::string_view layer_letters(int64_t layer_number) const;
  bool has_pre_norm() const { return norm_placement != NormPlacement::kPost; }
  bool has_post_norm() const { return norm_placement != NormPlacement::kPre; }
  // Whether the output of a sublayer changes before it is added, apart from norms.
  bool changes_branches(bool training) const {
    return branch_scales || residual_multiplier != 1.0 || (training && hidden_dropout > 0.0);
  }
  bool qkv_bias() const { return (add_bias_linear || add_qkv_bias) && projects_with_bias; }
};

}  // namespace megatron
