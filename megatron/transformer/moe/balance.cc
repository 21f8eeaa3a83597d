#include "megatron/transformer/moe/balance.h"

#include "megatron/base/check.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "megatron/transformer/moe/router_function.h"
#include "megatron/transformer/moe/routing_replay.h"

namespace megatron {
namespace {

constexpr std::string_view kMicro = "load_balancing_loss";
constexpr std::string_view kSequence = "seq_load_balancing_loss";
constexpr std::string_view kGlobal = "global_load_balancing_loss";
constexpr std::string_view kZ = "z_loss";

std::string name_in_layer(std::string_view name, int64_t layer_number) {
  return cat("moe/", name, "_layer_", layer_number - 1);
}

constexpr std::array<std::string_view, kBalanceTerms> kNames = {kMicro, kSequence, kGlobal, kZ};

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
      routing_{.topk = topk, .score = score},
      coefficients_{options.micro, options.sequence, options.global, options.z},
      divides_rows_(divides_rows),
      groups_(groups) {}

bool RouterBalance::wanted(const ForwardContext& pass) const {
  return pass.training && pass.auxiliary_losses != nullptr &&
         (options_.has_balance() || options_.z != 0.0);
}

// What is counted, and summed over ranks, is not counted again when the pass is recomputed.
RouterSums RouterBalance::sums(int64_t rows, const ForwardContext& pass) const {
  MEGATRON_ASSERT(pass.auxiliary_losses != nullptr && pass.tokens.of_sequence.defined(),
                  "losses of a router need the weights of tokens");
  RouterSums sums;
  sums.sequences = pass.tokens.of_sequence.numel();
  const at::Tensor padding = pass.tokens.padding_rows(pass.first_row, rows / sums.sequences);
  if (padding.defined()) sums.padding = padding.reshape({-1});
  sums.shares = true;
  sums.squares = options_.z != 0.0;
  sums.counts = options_.has_balance() && (pass.tape == nullptr || !pass.tape->runs_again());
  return sums;
}

RouterLosses RouterBalance::losses(const RouterPass& sums, const ForwardContext& pass) {
  RouterPass whole = sums;
  at::Tensor global;
  if (options_.has_balance()) {
    whole.counts = computed_once(pass.tape, [&] {  // of whole sequences
      (pass.cp != nullptr ? *pass.cp : groups_.cp).all_reduce(sums.counts)->wait();
      if (divides_rows_) groups_.tp.all_reduce(sums.counts)->wait();
      return replayed(sums.counts, pass);
    });
  }
  if (options_.global != 0.0) {
    global = computed_once(pass.tape,
                           [&] { return count_globally(whole.counts.sum(0), pass.discarded); });
  }
  return router_losses(whole, global, pass.tokens.of_sequence, routing_.topk, coefficients_);
}

// A log divides the sum of such pairs, over layers too.
void RouterBalance::add(const std::array<at::Tensor, kBalanceTerms>& losses,
                        const at::Tensor& weights, const ForwardContext& pass) const {
  for (size_t i = 0; i < kBalanceTerms; ++i) {
    if (!losses[i].defined()) continue;
    const at::Tensor weight = weights.select(0, static_cast<int64_t>(i));
    pass.auxiliary_losses->add(kNames[i], losses[i], weight, LossRows::kOwn, LossDivision::kNone);
    if (options_.per_layer)
      pass.auxiliary_losses->add(name_in_layer(kNames[i], layer_number_),
                                 losses[i].detach() / coefficients_[i], weight / coefficients_[i],
                                 LossRows::kOwn, LossDivision::kNone);
  }
}

void RouterBalance::add_losses(const at::Tensor& logits, const LayerContext& context) {
  if (!wanted(context.pass)) return;
  const RouterSums wanted_sums = sums(logits.size(0), context.pass);
  const RouterPass pass = router_sums(logits, routing_, wanted_sums);
  const RouterLosses found = losses(pass, context.pass);
  add(router_outputs(logits, routing_, pass, wanted_sums, found).losses, found.weights,
      context.pass);
}

at::Tensor RouterBalance::replayed(const at::Tensor& counts, const ForwardContext& pass) const {
  const RoutingReplay* replay = pass.routing;
  if (replay == nullptr || replay->only_experts) return counts;
  const at::Tensor& samples = pass.place.sample;
  if (replay->imposed != nullptr)
    return replay->imposed->find_counts(layer_number_, samples, pass.layer_use);
  if (replay->record != nullptr && !pass.discarded)
    replay->record->record_counts(layer_number_, samples, counts, pass.layer_use);
  return counts;
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
