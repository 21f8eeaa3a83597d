// Mixture of experts: which layers have experts, how a router chooses them, and what balances them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/kernels/experts/routing.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

enum class MoERouterDtype { kFp32, kFp64 };
// Which of an expert's rows stay within its capacity: those of the highest weights, or the first.
// Of equal weights the lower rows stay.
enum class DropPolicy { kProbs, kPosition };

struct MoEConfig {
  // -- architecture
  int64_t num_experts = 0;                     // 0: no experts
  std::string moe_layer_freq = "1";            // n: every n-th layer from the first; or a list
  std::optional<int64_t> moe_ffn_hidden_size;  // of one expert; none: ffn_hidden_size
  int64_t moe_router_topk = 2;
  RouterScore moe_router_score_function = RouterScore::kSoftmax;
  bool moe_router_pre_softmax = false;
  std::optional<double> moe_router_topk_scaling_factor;
  std::optional<int64_t> moe_router_num_groups, moe_router_group_topk;
  GroupScore moe_router_group_score = GroupScore::kSum;
  bool moe_router_enable_expert_bias = false;
  std::optional<int64_t> moe_shared_expert_intermediate_size;  // of all shared experts together
  bool moe_shared_expert_gate = false;
  std::optional<int64_t> moe_latent_size;
  bool moe_apply_probs_on_input = false;
  // -- numerics
  MoERouterDtype moe_router_dtype = MoERouterDtype::kFp32;
  // aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none; coefficients in the same order
  std::vector<std::string> moe_router_load_balancing_type = {"aux_loss"};
  std::vector<double> moe_aux_loss_coeff = {0.0};
  std::optional<double> moe_z_loss_coeff;
  double moe_router_bias_update_rate = 1e-3;
  std::optional<double> moe_input_jitter_eps;
  bool moe_router_force_load_balancing = false;
  std::optional<double> moe_router_force_biased;
  std::optional<double> moe_expert_capacity_factor;
  DropPolicy moe_token_drop_policy = DropPolicy::kProbs;
  // -- machine
  bool moe_pad_expert_input_to_capacity = false;
  bool moe_per_layer_logging = false;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool has_moe() const { return num_experts > 0; }
  // Layers count from 1.
  bool is_moe_layer(int64_t layer_number) const;
  int64_t num_moe_layers(int64_t num_layers) const;
  int64_t expert_ffn_size(const ShapeConfig& shape) const {
    return moe_ffn_hidden_size.value_or(shape.ffn_hidden_size);
  }
  // The coefficient of one of the balancing types; 0: no such loss.
  double balance_coefficient(std::string_view type) const;
  bool uses_sinkhorn() const;

 private:
  void architecture_fields(FieldVisitor& visitor);
  void training_fields(FieldVisitor& visitor);
};

}  // namespace megatron
