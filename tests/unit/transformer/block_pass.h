// Small blocks of layers, and one forward and backward of a whole block on one rank.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

inline TransformerConfig small_config() {
  TransformerConfig config;
  config.num_layers = 3;
  config.hidden_size = 32;
  config.num_attention_heads = 4;
  config.seq_length = 16;
  config.init_method_std = 0.3;
  config.hidden_dropout = config.attention_dropout = 0.0;
  config.finalize();
  return config;
}

inline TransformerConfig llama_config() {
  TransformerConfig config = small_config();
  config.normalization = Normalization::kRMSNorm;
  config.swiglu = true;
  config.ffn_hidden_size = 48;
  config.add_bias_linear = false;
  config.position_embedding_type = PositionEmbedding::kRope;
  config.group_query_attention = true;
  config.num_query_groups = 2;
  return config;
}

// Multi-latent attention whose value heads are narrower than its key heads.
inline TransformerConfig latent_config() {
  TransformerConfig config = llama_config();
  config.group_query_attention = false;
  config.multi_latent_attention = config.qk_layernorm = true;
  config.q_lora_rank = 12;
  config.kv_lora_rank = 10;
  config.qk_head_dim = 6;
  config.qk_pos_emb_head_dim = 4;
  config.v_head_dim = 8;
  config.kv_channels = config.query_head_size();
  config.rotary_scaling_factor = 4.0;
  config.rope_original_max_position_embeddings = 8;
  config.mscale = 0.7;
  config.mscale_all_dim = 0.5;
  return config;
}

inline at::Tensor draw(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::dtype(at::kDouble));
}

inline ForwardContext context_of(int64_t s, int64_t b) {
  ForwardContext context;
  context.place.position = at::arange(s, at::kLong);
  context.place.sample = at::arange(b, at::kLong);
  return context;
}

struct WholePass {
  at::Tensor y, dx;
  std::map<std::string, at::Tensor> grads;
};

// Forward and backward of the whole block on one rank.
inline WholePass run(const TransformerConfig& config, const at::Tensor& input, const at::Tensor& dy,
                     ForwardContext context, bool tape = true, ActivationOffload* offload = nullptr,
                     LayerMaker make = make_layer) {
  const ParallelGroups one;
  TransformerBlock block(config, 0, config.num_layers, /*final_norm=*/true,
                         /*sequence_parallel=*/false, one, make);
  PlainParameterStore store(block, at::kDouble, at::kCPU, true);
  initialize_parameters(block, 3, one);
  const at::Tensor x = input.clone().set_requires_grad(true);
  RecomputeTape cuts;
  if (tape) context.tape = &cuts;
  OffloadedPass in_host_memory;
  if (offload != nullptr) in_host_memory = OffloadedPass(*offload);
  if (offload != nullptr) context.offload = &in_host_memory;
  const at::Tensor y = block.forward(x, context);
  in_host_memory.begin_backward();
  cuts.backward(y, dy);
  WholePass pass{y.detach(), x.grad(), {}};
  block.visit([&](const std::string& name, Parameter& parameter) {
    pass.grads[name] = store.grad(parameter);
  });
  return pass;
}

inline void expect_identical(const WholePass& a, const WholePass& b, const std::string& what) {
  EXPECT_TRUE(at::equal(a.y, b.y)) << what;
  EXPECT_TRUE(at::equal(a.dx, b.dx)) << what;
  ASSERT_EQ(a.grads.size(), b.grads.size());
  for (const auto& [name, grad] : a.grads)
    EXPECT_TRUE(at::equal(grad, b.grads.at(name))) << what << ": " << name;
}

}  // namespace megatron
