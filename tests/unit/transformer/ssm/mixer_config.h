// A model of one small Mamba-2 layer.
#pragma once

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

inline TransformerConfig mixer_config(int64_t heads, int64_t groups) {
  TransformerConfig config;
  config.num_layers = 1;
  config.layer_pattern = "M";
  config.hidden_size = 8;
  config.num_attention_heads = 1;
  config.seq_length = 16;
  config.mamba_num_heads = heads;
  config.mamba_head_dim = 2;
  config.mamba_state_dim = 8;
  config.mamba_num_groups = groups;
  config.normalization = Normalization::kRMSNorm;
  config.init_method_std = 0.4;
  config.hidden_dropout = 0.0;
  config.finalize();
  return config;
}

}  // namespace megatron
