#include "megatron/transformer/moe/balance.h"

#include "megatron/base/check.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"

namespace megatron {
namespace {

constexpr std::string_view kMicro = "load_balancing_loss";
constexpr std::string_view kSequence = "seq_load_balancing_loss";
constexpr std::string_view kGlobal = "global_load_balancing_loss";
constexpr std::string_view kZ = "z_loss";

std::string name_in_layer(std::string_view name, int64_t layer_number) {
  return cat("moe/", name, "_layer_", layer_number - 1);
}

// Assignments by expert [..., E] as shares of the tokens, of which each has k.
at::Tensor shares_of_tokens(const at::Tensor& counts, int64_t k) {
  const at::Tensor wide = counts.to(at::kDouble);
  return wide * static_cast<double>(k) / at::clamp_min(wide.sum(-1, /*keepdim=*/true), 1);
}

}  // namespace

std::vector<std::string_view> balance_loss_names(const BalanceOptions& options) {
  std::vector<std::string_view> names;
  if (options.micro != 0.0) names.push_back(kMicro);
  if (options.sequence != 0.0) names.push_back(kSequence);
  if (options.global != 0.0) names.push_back(kGlobal);
  if (options.z != 0.0) names.push_back(kZ);
  return names;
}

std::vector<std::string> layer_loss_names(const BalanceOptions& options, int64_t layer_number) {
  std::vector<std::string> names;
  for (const std::string_view name : balance_loss_names(options))
    names.push_back(name_in_layer(name, layer_number));
  return names;
}

RouterBalance::RouterBalance(const BalanceOptions& options, int64_t layer_number, RouterScore score,
                             int64_t topk, bool divides_rows, const ParallelGroups& groups)
    : options_(options),
      layer_number_(layer_number),
      score_(score),
      topk_(topk),
      divides_rows_(divides_rows),
      groups_(groups) {}

void RouterBalance::add_losses(const at::Tensor& logits, const LayerContext& context) {
  const ForwardContext& pass = context.pass;
  MEGATRON_ASSERT(pass.auxiliary_losses != nullptr && pass.tokens.of_sequence.defined(),
                  "losses of a router need the weights of tokens");
  const at::Tensor of_sequence = pass.tokens.of_sequence.to(logits.scalar_type());  // [b]
  const int64_t b = of_sequence.numel(), s = logits.size(0) / b, experts = logits.size(1);
  const at::Tensor padding = pass.tokens.padding_rows(pass.first_row, s);  // [s, b]
  at::Tensor weights = of_sequence.expand({s, b});                         // a_i
  if (padding.defined()) weights = weights.masked_fill(padding, 0);
  const at::Tensor weight = weights.sum();
  if (options_.has_balance()) {
    const at::Tensor p = score_shares(logits, score_);
    const at::Tensor counted =
        padding.defined() ? padding.logical_not().reshape({-1, 1}) : at::Tensor();
    const ExpertShares phi = shares_of(p, counted, pass);
    // [b, E]: a_i p_ie summed over the tokens of a sequence
    const at::Tensor sums = (p.view({s, b, experts}) * weights.unsqueeze(2)).sum(0);
    const double scale = static_cast<double>(experts) / static_cast<double>(topk_);
    const auto term = [&](const at::Tensor& share) {
      return (sums * share.to(sums.scalar_type())).sum() * scale;
    };
    if (phi.micro.defined()) add(kMicro, options_.micro, term(phi.micro), weight, pass);
    if (phi.sequence.defined()) add(kSequence, options_.sequence, term(phi.sequence), weight, pass);
    if (phi.global.defined()) add(kGlobal, options_.global, term(phi.global), weight, pass);
  }
  if (options_.z != 0.0)
    add(kZ, options_.z, (weights.reshape({-1}) * logits.logsumexp(1).square()).sum(), weight, pass);
}

// A log divides the sum of such pairs, over layers too.
void RouterBalance::add(std::string_view name, double coefficient, const at::Tensor& term,
                        const at::Tensor& weight, const ForwardContext& pass) const {
  pass.auxiliary_losses->add(name, term * coefficient, weight * coefficient, LossRows::kOwn,
                             LossDivision::kNone);
  if (options_.per_layer)
    pass.auxiliary_losses->add(name_in_layer(name, layer_number_), term.detach(), weight,
                               LossRows::kOwn, LossDivision::kNone);
}

// What is counted, and summed over ranks, is not counted again when the pass is recomputed.
ExpertShares RouterBalance::shares_of(const at::Tensor& p, const at::Tensor& counted,
                                      const ForwardContext& pass) {
  const int64_t b = pass.tokens.of_sequence.numel();
  ExpertShares shares;
  const at::Tensor counts = computed_once(pass.tape, [&] {  // [b, E], of whole sequences
    const at::Tensor sums =
        count_assignments(top_experts(p.detach(), topk_), counted, b, p.size(1));
    (pass.cp != nullptr ? *pass.cp : groups_.cp).all_reduce(sums)->wait();
    if (divides_rows_) groups_.tp.all_reduce(sums)->wait();
    return sums;
  });
  if (options_.sequence != 0.0) shares.sequence = shares_of_tokens(counts, topk_);
  if (options_.micro != 0.0) shares.micro = shares_of_tokens(counts.sum(0), topk_);
  if (options_.global != 0.0) {
    const auto compute = [&] { return count_globally(counts.sum(0), pass.discarded); };
    shares.global = shares_of_tokens(computed_once(pass.tape, compute), topk_);
  }
  return shares;
}

at::Tensor RouterBalance::count_globally(const at::Tensor& counts, bool discarded) {
  groups_.dp.all_reduce(counts)->wait();
  if (!step_counts_.defined()) step_counts_ = at::zeros_like(counts);  // before graphs are recorded
  if (discarded) return counts;
  step_counts_.add_(counts);
  return step_counts_.clone();
}

void RouterBalance::step_ended() {
  if (step_counts_.defined()) step_counts_.zero_();
}

}  // namespace megatron
