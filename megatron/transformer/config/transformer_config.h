// Shape and behavior of a transformer. Every field is a flag, spelled as in Megatron where Megatron
// has it; docs/flags.md lists them. docs/design/configuration.md
#pragma once

#include "megatron/base/topic_list.h"
#include "megatron/nn/parameter.h"
#include "megatron/tensor/activation.h"
#include "megatron/transformer/config/attention.h"
#include "megatron/transformer/config/attention_backend.h"
#include "megatron/transformer/config/feed_forward.h"
#include "megatron/transformer/config/hybrid.h"
#include "megatron/transformer/config/initialization.h"
#include "megatron/transformer/config/layer.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/mamba.h"
#include "megatron/transformer/config/moe/moe.h"
#include "megatron/transformer/config/moe/moe_dispatch.h"
#include "megatron/transformer/config/multi_latent_attention.h"
#include "megatron/transformer/config/multi_token_prediction.h"
#include "megatron/transformer/config/offload.h"
#include "megatron/transformer/config/output.h"
#include "megatron/transformer/config/position.h"
#include "megatron/transformer/config/precision.h"
#include "megatron/transformer/config/recompute.h"
#include "megatron/transformer/config/shape.h"
#include "megatron/transformer/config/ssm/linear_attention.h"

namespace megatron {

// A new topic is a header, a source and a line here. Groups of flags are in the order in which the
// topics start them.
using TransformerTopics =
    TopicList<PositionConfig, LayerConfig, AttentionConfig, MultiLatentAttentionConfig,
              FeedForwardConfig, MoEConfig, MoEDispatchConfig, PrecisionConfig, LoraConfig,
              InitializationConfig, OutputConfig, RecomputeConfig, OffloadConfig,
              AttentionBackendConfig, MultiTokenPredictionConfig, HybridConfig, MambaConfig,
              LinearAttentionConfig>;

struct TransformerConfig : Config, ShapeConfig, TransformerTopics {
  void fields(FieldVisitor& visitor) override;
  // The rules of each topic, then those between topics.
  void validate(Violations& v) const override;

  // Derives fields that were left at 0 or given by an alias. Idempotent; called after parsing.
  void finalize();

  // -- derived from several topics
  Activation activation() const;
  double softmax_scale() const;
  int64_t rotary_width() const {
    return multi_latent_attention ? qk_pos_emb_head_dim : PositionConfig::rotary_width(*this);
  }
  RotaryScaling rotary_scaling() const;
  // Widths of the output of a head, and of all heads: of linear_proj's input.
  int64_t value_head_size() const { return multi_latent_attention ? v_head_dim : kv_channels; }
  int64_t attention_width() const { return num_attention_heads * value_head_size(); }
  // Whether the layer (numbered from 1) uses rotary_base_local.
  bool is_rotary_local(int64_t layer_number) const {
    return rotary_base_local.has_value() && !window(layer_number).empty();
  }
  // Quantisation of the linears of a layer; layers count from 1.
  QuantizationOptions quantization(int64_t layer_number) const {
    return PrecisionConfig::quantization(layer_number, num_layers);
  }
  // The letters of a layer's kind (transformer/layer_kinds.h); layers count from 1.
  std::string_view layer_letters(int64_t layer_number) const {
    if (is_hybrid()) return hybrid_letter(layer_number);
    return is_moe_layer(layer_number) ? "*E" : LayerConfig::layer_letters(layer_number);
  }
  // The layer's number in keys of dropout: that among the layers of its letter, so that the pattern
  // *-*- drops what two layers of attention and MLP drop.
  int64_t draw_number(int64_t layer_number) const;
  // Whether some layer has attention.
  bool attends() const { return !is_hybrid() || has_letter('*') || has_letter('+'); }
  bool is_given() const { return ShapeConfig::is_given(attends()); }
  // Whether a layer has this letter.
  bool has_letter(char letter) const;
  // Whether tensor ranks can divide the rows between the products of a forward alone (DividedRows):
  // every layer is attention and MLP, and no product has tiles of 128 rows.
  bool can_divide_rows() const;
  // Initialisation of a weight [rows, columns]; `output` is for those whose product is added to the
  // residual stream: std is divided by the square root of the number of residual connections.
  Init weight_init(int64_t rows, int64_t columns, bool output = false) const;
  Init embedding_init(int64_t rows) const;
};

}  // namespace megatron
