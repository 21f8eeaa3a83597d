// What a token attends to, and how scores are computed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

// What the softmax over scores sums beside their exponentials: nothing; 1, the exponential of a
// score of 0; or that of a learnable score of each head (an attention sink), softmax_offset.
enum class SoftmaxType { kVanilla, kOffByOne, kLearnable };

struct AttentionConfig {
  // Scores are divided by its square root; none: kv_channels
  std::optional<double> query_pre_attn_scalar;
  double attn_logit_softcapping = 0.0;  // c: scores become c tanh(score / c); 0: none
  // {left, right}, of which causal attention has the left; empty: none
  std::vector<int64_t> window_size;
  // Integer n: every n-th layer attends fully; or a list "[1,0,...]", 1 = windowed; empty: all
  // layers are windowed.
  std::string window_attn_skip_freq;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;
  bool attention_output_gate = false;  // heads are multiplied by the sigmoid of their gate
  double attention_dropout = 0.1;
  // Tokens attend to no later ones. Not a flag: a model of encoders says no
  bool causal = true;
  // Not a flag: the layers, from 1, whose tokens attend within their whole sample; those of others
  // attend within a part of it (ForwardContext::unpadded_parts). None: all layers
  std::optional<std::vector<int64_t>> whole_sample_layers;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // {left, right} of the layer (numbered from 1), or empty when it attends fully.
  std::vector<int64_t> window(int64_t layer_number) const;
  // Whether tokens of the layer (numbered from 1) attend within parts of their sample.
  bool attends_within_parts(int64_t layer_number) const;
};

}  // namespace megatron
