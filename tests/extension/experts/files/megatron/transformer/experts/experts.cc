#include "megatron/transformer/experts/experts.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/transformer/layer/auxiliary_losses.h"

namespace megatron {
namespace {

constexpr double kBalance = 0.01;  // coefficient of the auxiliary loss

// The router is whole on every rank.
const ParallelGroups& one_rank() {
  static const ParallelGroups groups;
  return groups;
}

LinearOptions router_options(const TransformerConfig& config) {
  LinearOptions options;
  options.bias = false;
  options.init = config.weight_init(kNumExperts, config.hidden_size);
  return options;
}

TransformerConfig without_norms(TransformerConfig config) {
  config.norm_placement = NormPlacement::kPost;  // that of the input is this sublayer's
  return config;
}

// From the grid of other weights to that of experts, where the tensor ranks are the same.
void place_on_experts_grid(Placement& placement) {
  placement.expert = true;
  for (Shard& shard : placement.shards) shard.axis = Axis::kExpertTensor;
  if (!placement.partial_grad.empty()) placement.partial_grad = {Axis::kExpertTensor};
}

}  // namespace

Experts::Experts(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                 const ParallelGroups& groups)
    : groups_(groups),
      divides_rows_(sequence_parallel && groups.tp.size() > 1),
      expert_config_(without_norms(config)),
      router_("router", config.hidden_size, kNumExperts, router_options(config), one_rank()) {
  MEGATRON_CHECK(kNumExperts % groups.ep.size() == 0, kNumExperts,
                 " experts are not divisible by --expert-model-parallel-size ", groups.ep.size());
  MEGATRON_CHECK(groups.cp_widths.empty() || groups.ep.size() == 1,
                 "experts over several ranks need sequences of one length on all of them: not with "
                 "--hybrid-context-parallel");
  MEGATRON_CHECK(!config.offloads_activations(), "experts with offloading are not built");
  if (config.has_pre_norm()) {
    norm_ = std::make_unique<Norm>(
        config.hidden_size, NormOptions{config.normalization, config.layernorm_epsilon,
                                        config.layernorm_zero_centered_gamma, divides_rows_});
    add("norm", norm_.get());
  }
  router_.weight().placement = {};
  if (divides_rows_) router_.weight().placement.partial_grad.insert(Axis::kTensor);
  add("router", &router_);
  const int64_t own = kNumExperts / groups.ep.size();
  for (int64_t i = 0; i < own; ++i) {
    experts_.push_back(
        std::make_unique<MLP>(expert_config_, layer_number, sequence_parallel, groups));
    for (Parameter* p : experts_.back()->parameters()) place_on_experts_grid(p->placement);
    add(cat("experts.", groups.ep.rank() * own + i), experts_.back().get());
  }
}

SublayerOutput Experts::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  const ProcessGroup& ep = groups_.ep;
  const at::Tensor normed =
      (norm_ != nullptr ? norm_->forward(x) : x).to(router_.weight().value.scalar_type());
  const at::Tensor p = router_.forward(normed).softmax(
      -1, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor chosen = at::zeros_like(p).scatter_(-1, p.argmax(-1, true), 1);
  if (context.pass.auxiliary_losses != nullptr) add_balance_loss(p, chosen, context.pass);
  const at::Tensor tokens = gather_from_sequence_parallel_region(normed, ep);
  const auto weights =
      gather_from_sequence_parallel_region((p * chosen).to(normed.scalar_type()), ep)
          .chunk(kNumExperts, -1);
  at::Tensor y;
  for (size_t i = 0; i < experts_.size(); ++i) {
    const at::Tensor of_expert = experts_[i]->forward(tokens, context, /*add=*/false).output;
    const at::Tensor& weight = weights[static_cast<size_t>(ep.rank()) * experts_.size() + i];
    y = y.defined() ? at::addcmul(y, of_expert, weight) : of_expert * weight;
  }
  y = reduce_scatter_to_sequence_parallel_region(y, ep);
  if (add) return {y + x, {}};
  return {y, x};
}

// p, chosen [s, b, E] (s/t): those of this rank's rows.
void Experts::add_balance_loss(const at::Tensor& p, const at::Tensor& chosen,
                               const ForwardContext& pass) {
  const at::Tensor counts = chosen.sum(0);  // [b, E], of whole sequences after the sums
  (pass.cp != nullptr ? *pass.cp : groups_.cp).all_reduce(counts)->wait();
  if (divides_rows_) groups_.tp.all_reduce(counts)->wait();
  const at::Tensor part = counts / counts.sum(-1, true);
  pass.auxiliary_losses->add("load_balance", kBalance * kNumExperts * (p * part).sum(),
                             at::full({}, p.size(0) * p.size(1), p.options()));
}

}  // namespace megatron
