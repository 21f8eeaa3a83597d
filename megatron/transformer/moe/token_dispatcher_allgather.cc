// All tokens travel to all ranks of the group, which take what their experts need and return fp32
// sums over their own experts.
#include <algorithm>
#include <utility>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/token_dispatch.h"

namespace megatron {
namespace {

class AllgatherDispatch final : public TokenDispatch {
 public:
  AllgatherDispatch(const at::Tensor& choices, DispatchCounts counts,
                    const DispatchOptions& options, const ExpertGroups& groups)
      : topk_(choices.size(1)),
        tokens_(choices.size(0)),
        most_tokens_(counts.most_tokens),
        plan_(std::move(counts.plan)),
        all_(groups.all) {
    const int64_t experts = options.num_experts / counts.ranks.ep;
    order_ =
        order_by_expert(gather(choices, /*padding=*/-1), counts.ranks.ep_rank * experts, experts);
    // Within a token by expert: the order of the sum, whatever the rounds.
    sum_order_ = std::get<0>(without_padding(order_.rows, options).sort(1));
  }

  int64_t rounds() const override { return plan_.rounds(); }
  bool communicates() const override { return true; }
  ExpertCounts counts(int64_t number) override {
    return counts_of(plan_.round(number), order_.rows);
  }

  RowsOfRound to_experts(const at::Tensor& x, const at::Tensor& weights, bool) override {
    const auto [all, rows_arrive] = start_gather(x, 0);
    const auto [all_weights, weights_arrive] =
        weights.defined() ? start_gather(weights, 0) : Gathered{};
    return [this, all = all, all_weights = all_weights, rows_arrive = rows_arrive,
            weights_arrive = weights_arrive](int64_t number) mutable {
      for (std::shared_ptr<Work>* work : {&rows_arrive, &weights_arrive})
        if (const auto started = std::exchange(*work, nullptr)) started->wait();
      const DispatchRound r = plan_.round(number);
      const at::Tensor choices = order_.choices.narrow(0, r.first_row, r.rows);
      ExpertRows result;
      result.rows = gather_rows(all, choices, topk_);
      if (all_weights.defined()) result.weights = gather_rows(all_weights.reshape({-1}), choices);
      return result;
    };
  }

  ExpertRows from_experts(const RowsOfRound& results, const at::Tensor& base) override {
    at::Tensor sums, weights;  // of all tokens, this rank's experts
    ExpertRows rows;
    for (int64_t number = 0; number < rounds(); ++number) {
      if (rows.meanwhile) rows.meanwhile();
      rows = results(number);
      const DispatchRound r = plan_.round(number);
      if (!sums.defined())
        sums = at::zeros({all_.size() * most_tokens_, rows.rows.size(1)},
                         rows.rows.options().dtype(accumulate_type(rows.rows)));
      add_rows(rows.rows, places(r, sum_order_), sums);
      if (!rows.weights.defined()) continue;
      const at::Tensor of_round = gather_rows(rows.weights, places(r, order_.rows));
      weights = weights.defined() ? weights.add_(of_round) : of_round;
    }
    return scatter(sums, weights, rows, base);
  }

 private:
  using Gathered = std::pair<at::Tensor, std::shared_ptr<Work>>;

  // The tokens of all ranks, filled up to the same number: [e x * most, ...].
  Gathered start_gather(const at::Tensor& x, double padding) const {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[0] = most_tokens_;
    const at::Tensor own = at::full(shape, padding, x.options());
    own.narrow(0, 0, tokens_).copy_(x);
    shape[0] *= all_.size();
    const at::Tensor result = at::empty(shape, x.options());
    return {result, most_tokens_ > 0 ? all_.all_gather(result, own) : nullptr};
  }
  at::Tensor gather(const at::Tensor& x, double padding) const {
    const auto [result, work] = start_gather(x, padding);
    if (work) work->wait();
    return result;
  }

  // Places in the order of this rank's rows as places in a round; -1: not in it.
  static at::Tensor places(const DispatchRound& r, const at::Tensor& places) {
    const at::Tensor local = places - r.first_row;
    return at::where(local.ge(0).logical_and(local.lt(r.rows)), local, -1);
  }

  // Sums over all ranks of what each has for this rank's tokens, added to `base`.
  ExpertRows scatter(const at::Tensor& sums, const at::Tensor& weights, const ExpertRows& last,
                     const at::Tensor& base) const {
    const auto start = [this](const at::Tensor& own, const at::Tensor& all) {
      return most_tokens_ > 0 ? all_.reduce_scatter(own, all) : nullptr;
    };
    const at::Tensor own = at::empty({most_tokens_, sums.size(1)}, sums.options());
    const auto work = start(own, sums);
    at::Tensor own_weights;
    std::shared_ptr<Work> weight_work;
    if (weights.defined()) {
      own_weights = at::empty({most_tokens_, topk_}, weights.options());
      weight_work = start(own_weights, weights.contiguous());
    }
    if (last.meanwhile) last.meanwhile();
    if (work) work->wait();
    if (weight_work) weight_work->wait();
    ExpertRows result;
    at::Tensor tokens = own.narrow(0, 0, tokens_);
    if (base.defined()) tokens.add_(base);
    result.rows = tokens.to(last.rows.scalar_type());
    if (own_weights.defined()) result.weights = own_weights.narrow(0, 0, tokens_);
    return result;
  }

  const int64_t topk_, tokens_, most_tokens_;
  const DispatchPlan plan_;
  const ProcessGroup all_;
  ExpertOrder order_;     // of the choices of all tokens that are experts of this rank
  at::Tensor sum_order_;  // [e x * most, k]: rows of a token's choices by expert
};

}  // namespace

std::shared_ptr<TokenDispatch> dispatch_allgather(const at::Tensor& choices, DispatchCounts counts,
                                                  const DispatchOptions& options,
                                                  const ExpertGroups& groups) {
  return std::make_shared<AllgatherDispatch>(choices, std::move(counts), options, groups);
}

}  // namespace megatron
