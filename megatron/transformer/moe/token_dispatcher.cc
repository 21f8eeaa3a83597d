#include "megatron/transformer/moe/token_dispatcher.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/peer_rows.h"
#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/moe/detail/token_dispatch.h"

namespace megatron {
namespace {

// All experts on this rank.
class LocalDispatch final : public TokenDispatch {
 public:
  LocalDispatch(const at::Tensor& choices, const DispatchOptions& options)
      : topk_(choices.size(1)),
        dropless_(options.dropless),
        order_(order_by_expert(choices, 0, options.num_experts)) {
    if (options.padded)
      order_.choices = order_.choices.narrow(0, 0, options.num_experts * options.capacity).clone();
    summed_ = without_padding(order_.rows, options);
  }

  int64_t rounds() const override { return 1; }
  ExpertCounts counts(int64_t) override { return {order_.counts, {}}; }
  bool communicates() const override { return false; }

  RowsOfRound to_experts(const at::Tensor& x, const at::Tensor& weights, bool) override {
    return [this, x, weights](int64_t) {
      ExpertRows result;
      result.rows = dropless_ ? spread_rows(x, order_.rows) : gather_rows(x, order_.choices, topk_);
      if (weights.defined()) result.weights = gather_rows(weights.reshape({-1}), order_.choices);
      return result;
    };
  }

  ExpertRows from_experts(const RowsOfRound& results, const at::Tensor& base) override {
    const ExpertRows rows = results(0);
    if (rows.meanwhile) rows.meanwhile();
    ExpertRows sums;
    sums.rows = sum_rows(rows.rows, summed_, base);
    if (rows.weights.defined()) sums.weights = gather_rows(rows.weights, order_.rows);
    return sums;
  }

 private:
  const int64_t topk_;
  const bool dropless_;
  ExpertOrder order_;
  at::Tensor summed_;  // the rows of each token's sum
};

// Rows of each expert on each rank of the group, the tokens of each, and `more` counts:
// [e x, E + 1 + their number] on the host.
at::Tensor exchange_counts(const ExpertOrder& order, const at::Tensor& more,
                           const ProcessGroup& all) {
  const at::Tensor tokens = at::full({1}, order.rows.size(0), order.counts.options());
  std::vector<at::Tensor> own = {order.counts, tokens};
  if (more.defined()) own.push_back(more);
  const at::Tensor counts = at::cat(own);
  at::Tensor result = at::empty({all.size(), counts.numel()}, counts.options());
  all.all_gather(result, counts)->wait();
  return result.to(at::kCPU, at::kLong);
}

std::vector<int64_t> numbers_of(const at::Tensor& table) {
  const at::Tensor numbers = table.contiguous();
  const int64_t* first = numbers.const_data_ptr<int64_t>();
  return {first, first + numbers.numel()};
}

// `parts`: how many tokens go to each part of the experts; undefined: not asked for.
DispatchCounts all_counts(const ExpertOrder& order, const at::Tensor& parts,
                          const DispatchOptions& options, const ExpertGroups& groups) {
  const ExpertRanks ranks{groups.ep.size(), groups.etp.size(), groups.ep.rank(), groups.etp.rank()};
  MEGATRON_ASSERT(groups.all.size() == ranks.size() && groups.all.rank() == ranks.rank(), "rank ",
                  groups.all.rank(), " of ", groups.all.size(), " is rank ", ranks.rank(), " of ",
                  ranks.size(), " in its grid");
  const at::Tensor all = exchange_counts(order, parts, groups.all);
  const at::Tensor tokens = all.select(1, options.num_experts);
  int64_t max_rows = 0;
  if (options.rank_capacity_factor > 0) {
    const int64_t topk = options.padded ? options.topk : order.rows.size(1);
    const double share = static_cast<double>(tokens.sum().item<int64_t>() * topk) / ranks.ep;
    max_rows = std::max<int64_t>(1, std::ceil(options.rank_capacity_factor * share));
  }
  DispatchCounts counts{ranks,
                        DispatchPlan(ranks, options.num_experts,
                                     numbers_of(all.narrow(1, 0, options.num_experts)), max_rows),
                        tokens.max().item<int64_t>()};
  if (parts.defined())
    counts.tokens.emplace(ranks, ranks.ep,
                          numbers_of(all.narrow(1, options.num_experts + 1, ranks.ep)),
                          /*max_rows=*/0);
  return counts;
}

}  // namespace

ExpertGroups expert_groups(const ParallelGroups& groups) {
  ExpertGroups result{
      groups.group({Axis::kExpert}), groups.group({Axis::kExpertTensor}), {}, {}, {}};
  result.all = result.etp.size() == 1  ? result.ep
               : result.ep.size() == 1 ? result.etp
                                       : groups.group({Axis::kExpertTensor, Axis::kExpert});
  result.memory = result.all.peer_rows();
  result.mailbox = result.all.mailbox();
  return result;
}

std::shared_ptr<PeerRows> open_expert_rows(const TransformerConfig& config,
                                           const ParallelGroups& groups, at::Device device) {
  if (!config.has_moe() || config.moe_token_dispatcher_type != TokenDispatcherType::kFlex)
    return nullptr;
  std::shared_ptr<PeerRows> memory = expert_groups(groups).memory;
  if (memory) memory->reserve(device, 1);  // the first exchanges make room for their rows
  return memory;
}

at::Tensor without_padding(const at::Tensor& of_choices, const DispatchOptions& options) {
  return options.padded ? of_choices.narrow(1, 0, options.topk).contiguous() : of_choices;
}

at::Tensor sum_of_parts(const at::Tensor& rows, int64_t parts) {
  if (parts == 1) return rows.clone();
  const int64_t n = rows.size(0) / parts;
  at::Tensor sum =
      rows.narrow(0, 0, n).to(accumulate_type(rows), /*non_blocking=*/false, /*copy=*/true);
  for (int64_t part = 1; part < parts; ++part) sum.add_(rows.narrow(0, part * n, n));
  return sum.to(rows.scalar_type());
}

at::Tensor on_device_of(const at::Tensor& like, const std::vector<int64_t>& numbers,
                        at::ScalarType type) {
  return at::tensor(numbers, at::dtype(at::kLong)).to(like.device(), type);
}

ExpertCounts counts_of(const DispatchRound& round, const at::Tensor& like) {
  ExpertCounts counts{on_device_of(like, round.expert_rows, at::kInt), {}};
  if (round.first_row > 0) counts.before = at::tensor(round.rows_before, at::dtype(at::kLong));
  return counts;
}

std::shared_ptr<TokenDispatch> dispatch_tokens(const at::Tensor& choices,
                                               const DispatchOptions& options,
                                               const ExpertGroups& groups) {
  const at::NoGradGuard no_grad;
  check_shape("choices of experts", choices, {-1, -1});
  if (groups.all.size() == 1) return std::make_shared<LocalDispatch>(choices, options);
  ExpertOrder order = order_by_expert(choices, 0, options.num_experts), by_part;
  if (options.type == TokenDispatcherType::kFlex) {
    const int64_t parts = groups.ep.size();
    by_part =
        order_by_expert(parts_of_choices(choices, parts, options.num_experts / parts), 0, parts);
  }
  DispatchCounts counts = all_counts(order, by_part.counts, options, groups);
  switch (options.type) {
    case TokenDispatcherType::kAllgather:
      return dispatch_allgather(choices, std::move(counts), options, groups);
    case TokenDispatcherType::kAlltoall:
      return dispatch_alltoall(std::move(order), std::move(counts), options, groups);
    default:
      return dispatch_flex(choices, std::move(order), by_part, std::move(counts), options, groups);
  }
}

}  // namespace megatron
