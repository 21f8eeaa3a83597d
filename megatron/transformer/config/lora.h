// Low-rank adapters: which linears of a layer have them (--lora-targets), and how adapters divide
// the rows of fused linears.
//
//   name             rows                                  Hugging Face
//   linear_q         queries, and their gates, in          q_proj
//                    linear_qkv
//   linear_k         keys in linear_qkv                    k_proj
//   linear_v         values in linear_qkv                  v_proj
//   linear_qkv       all of linear_qkv                     (query_key_value, c_attn, qkv_proj)
//   linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, linear_kv_up_proj
//                    all of that linear of latent          q_proj, q_a_proj, q_b_proj,
//                    attention                             kv_a_proj_with_mqa, kv_b_proj
//   linear_proj      all of linear_proj                    o_proj
//   linear_fc1_gate  the gate rows of a gated linear_fc1   gate_proj
//   linear_fc1_up    the up rows of a gated linear_fc1     up_proj
//   linear_fc1       all of linear_fc1                     (dense_h_to_4h, c_fc, gate_up_proj)
//   linear_fc2       all of linear_fc2                     down_proj
//   in_proj          all of a state-space layer's in_proj  in_proj (in_proj_qkv, in_proj_z,
//                                                          in_proj_b, in_proj_a)
//   out_proj         all of its out_proj                   out_proj
//
// BERTs of Hugging Face say query, key and value, T5s q, k, v, o, wi_0, wi_1, wi and wo.
//
// In cross attention linear_q is all of the linear of that name, linear_k and linear_v are parts of
// linear_kv, and linear_qkv is both linears, each with one adapter for all its rows.
//
// linear_fc1 and linear_fc2 are those of MLPs and of shared experts; routers and routed experts
// have no adapters.
//
// The adapters of one linear are stored together: lora_A.weight [adapters * rank, k] is their
// concatenation in the order of the table; lora_B.weight [rows, rank] has the adapted rows of the
// linear, in the order of the linear.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tensor_parallel/lora_adapter.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

struct TransformerConfig;

// Hu et al. 2021 (arXiv:2106.09685)
struct LoraConfig {
  int64_t lora_rank = 0;             // 0: no adapters; above 0 only adapters are trained
  std::optional<double> lora_alpha;  // adapter outputs are multiplied by lora_alpha / lora_rank
  std::vector<std::string> lora_targets;  // TransformerConfig::finalize() expands them

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool has_adapters() const { return lora_rank > 0; }
};

// Which linears a model has.
struct AdaptableLinears {
  bool gated = false;  // its MLPs
  bool latent_attention = false, latent_queries = false;
  bool mlp = true;  // MLPs or shared experts
  bool attention = true;
  bool states = false;  // Mamba-2 or gated delta nets
};
AdaptableLinears adaptable_linears(const TransformerConfig& config);

// Expands `given` (names of either column, or all-linear) to names of the first column, without
// duplicates, in the order of the table. Names that are unknown, or of linears that the model does
// not have, are kept at the end.
std::vector<std::string> written_out_lora_targets(const std::vector<std::string>& given,
                                                  const AdaptableLinears& model);

// `targets` as written_out_lora_targets() returns them.
void validate_lora_targets(const std::vector<std::string>& targets, const AdaptableLinears& model,
                           Violations& violations);

// Names of the adapters of one linear (linear_qkv, linear_proj, linear_fc1, ..., of cross attention
// linear_q and linear_kv), in the order of the table; empty: none.
std::vector<std::string> lora_adapters(const TransformerConfig& config, std::string_view linear);

// The same as options of the linear.
LoraOptions lora_options(const TransformerConfig& config, std::string_view linear);

// Whether the full name of a parameter is that of an adapter.
bool is_lora_parameter(std::string_view name);

inline constexpr std::string_view kLoraA = "lora_A.weight";
inline constexpr std::string_view kLoraB = "lora_B.weight";

}  // namespace megatron
