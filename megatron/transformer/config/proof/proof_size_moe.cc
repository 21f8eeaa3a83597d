#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {
namespace {

// A width in the model's proportion to the hidden size, divided evenly; of quantised products in
// whole tiles.
int64_t tiny_width(int64_t width, const TransformerConfig& before, const TransformerConfig& t,
                   int64_t ranks) {
  const double part = static_cast<double>(width) / static_cast<double>(before.hidden_size);
  const int64_t wanted = std::llround(part * static_cast<double>(t.hidden_size));
  const int64_t unit = ranks * product_tile(t);
  return std::max<int64_t>(1, wanted / unit) * unit;
}

// Choices and groups of a tiny router.
void shrink_choices(TransformerConfig& t, Shrinker& shrinker) {
  if (!t.moe_router_num_groups) {
    shrinker.set("--moe-router-topk", t.moe_router_topk, one_or_several(t.moe_router_topk));
    return;
  }
  const int64_t kept = one_or_several(*t.moe_router_group_topk),
                groups = *t.moe_router_num_groups > *t.moe_router_group_topk ? 2 * kept : kept;
  const int64_t of_group = one_or_several(t.moe_router_topk / *t.moe_router_group_topk);
  shrinker.set("--moe-router-topk", t.moe_router_topk,
               std::max(kept * of_group, one_or_several(t.moe_router_topk)));
  shrinker.set("--moe-router-num-groups", t.moe_router_num_groups, groups);
  shrinker.set("--moe-router-group-topk", t.moe_router_group_topk, kept);
}

// The fewest experts of which every rank and group has several if it had, and which leave a choice
// where there was one.
int64_t tiny_experts(const TransformerConfig& t, const TransformerConfig& before,
                     int64_t ranks_before, int64_t ranks) {
  const int64_t groups = t.moe_router_num_groups.value_or(1),
                groups_before = before.moe_router_num_groups.value_or(1);
  const int64_t of_group = one_or_several(before.num_experts / groups_before);
  const int64_t unit =
      std::lcm(ranks * one_or_several(before.num_experts / ranks_before), groups * of_group);
  const int64_t open = t.moe_router_group_topk.value_or(1);  // groups to choose from
  const int64_t fewest = t.moe_router_topk + (before.num_experts > before.moe_router_topk ? 1 : 0);
  int64_t experts = unit;
  while (experts < fewest || open * (experts / groups) < t.moe_router_topk) experts += unit;
  return experts;
}

void remove_loss(MoEConfig& moe, std::string_view type) {
  std::vector<std::string>& types = moe.moe_router_load_balancing_type;
  const auto at = std::find(types.begin(), types.end(), type);
  moe.moe_aux_loss_coeff.erase(moe.moe_aux_loss_coeff.begin() + (at - types.begin()));
  types.erase(at);
  if (!types.empty()) return;
  types = {"none"};
  moe.moe_aux_loss_coeff = {0.0};
}

}  // namespace

void remove_balance_by_rank(TransformerConfig& t, const BalancedRows& rows, Shrinker& shrinker) {
  if (rows.parts > 1 && t.moe_expert_capacity_factor) {
    shrinker.lose("no --moe-expert-capacity-factor, which each rank applies to its own rows");
    t.moe_expert_capacity_factor = {};
    t.moe_token_drop_policy = DropPolicy::kProbs;
    t.moe_pad_expert_input_to_capacity = false;
  }
  if (rows.parts > 1 && t.uses_sinkhorn()) {
    shrinker.lose("no sinkhorn, which each rank applies to its own rows");
    t.moe_router_load_balancing_type = {"none"};
  }
  if (rows.data_ranks == 1 || t.balance_coefficient("global_aux_loss") == 0) return;
  // One rank computes it with micro-batches of all data ranks.
  if (!rows.per_token || t.moe_expert_capacity_factor) {
    shrinker.lose(
        "no global_aux_loss: --no-calculate-per-token-loss and a capacity are of micro-batches of "
        "one rank, it is of those of all data ranks");
    remove_loss(t, "global_aux_loss");
  } else if (t.balance_coefficient("aux_loss") > 0) {
    shrinker.lose("no aux_loss: one rank has either its micro-batches or those of global_aux_loss");
    remove_loss(t, "aux_loss");
  }
}

void shrink_experts(TransformerConfig& t, const TransformerConfig& before,
                    const ExpertProofRanks& ranks_before, const ExpertProofRanks& ranks,
                    Shrinker& shrinker) {
  if (!t.has_moe()) return;
  shrink_choices(t, shrinker);
  const int64_t experts = tiny_experts(t, before, ranks_before.expert, ranks.expert);
  if (experts < t.num_experts || t.num_experts % ranks.expert != 0)
    shrinker.set("--num-experts", t.num_experts, experts);
  shrinker.keep_several("experts per rank", before.num_experts / ranks_before.expert,
                        t.num_experts / ranks.expert);
  shrinker.set("--moe-ffn-hidden-size", t.moe_ffn_hidden_size,
               tiny_width(before.expert_ffn_size(before), before, t, ranks.expert_tensor));
  if (t.moe_shared_expert_intermediate_size)
    shrinker.set("--moe-shared-expert-intermediate-size", t.moe_shared_expert_intermediate_size,
                 tiny_width(*before.moe_shared_expert_intermediate_size, before, t, ranks.tensor));
  if (t.moe_latent_size)
    shrinker.set("--moe-latent-size", t.moe_latent_size,
                 tiny_width(*before.moe_latent_size, before, t, 1));
}

}  // namespace megatron
