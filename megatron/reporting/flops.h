// Floating-point operations of one training iteration, counted the way Megatron-LM reports them
// (docs/performance.md).
//
// Only matrix products, forward and backward (three times the forward); causal attention at half
// its full cost. Recomputation is not counted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megatron {

// Mixture-of-experts layers.
struct MoEFlops {
  int64_t num_experts = 0;
  std::vector<bool> is_moe_layer;  // per layer; empty: every layer
  int64_t topk = 2;
  int64_t ffn_hidden_size = 0;         // that of one expert
  int64_t shared_ffn_hidden_size = 0;  // 0: no shared expert
  int64_t latent_size = 0;             // 0: experts work on the hidden size
};

// Multi-latent attention.
struct MLAFlops {
  int64_t q_lora_rank = 0;  // 0: queries are projected directly from the hidden state
  int64_t kv_lora_rank = 0;
  int64_t qk_head_dim = 0;
  int64_t qk_pos_emb_head_dim = 0;
  int64_t v_head_dim = 0;
};

// Mamba-2 layers of a hybrid model.
struct MambaFlops {
  int64_t state_dim = 128;
  int64_t head_dim = 64;
  int64_t num_groups = 8;
};

struct ModelFlops {
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_query_groups = 0;
  int64_t kv_channels = 0;
  int64_t padded_vocab_size = 0;
  int64_t mtp_num_layers = 0;  // multi-token prediction depth
  bool gated = false;          // SwiGLU: three matrices in place of two
  bool attention_output_gate = false;
  std::optional<MoEFlops> moe;
  std::optional<MLAFlops> mla;
  std::string hybrid_pattern;  // letters M * - E; empty: a transformer
  MambaFlops mamba;
};

// Tokens of one iteration: for unpacked data tokens = samples * s and squared_lengths = samples *
// s^2.
struct IterationTokens {
  double tokens = 0;
  double squared_lengths = 0;
  static IterationTokens unpacked(int64_t samples, int64_t sequence_length);
};

double iteration_flops(const ModelFlops& model, const IterationTokens& work);

// Peak dense bf16 FLOP/s of a GPU by its name ("NVIDIA H200"), or 0 when it is not known.
double peak_bf16_flops(const std::string& device_name);

}  // namespace megatron
