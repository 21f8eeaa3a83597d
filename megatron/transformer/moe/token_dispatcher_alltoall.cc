// Rows travel to the ranks of their experts and back. Over the expert-tensor ranks, which hold
// parts of the same experts, rows are gathered and results summed in the order of the ranks.
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/token_dispatch.h"

namespace megatron {
namespace {

int64_t total(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// `rows` [n, ...] with another n.
at::Tensor empty_like_rows(const at::Tensor& rows, int64_t n) {
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = n;
  return at::empty(shape, rows.options());
}

// An exchange in flight: its result is there after wait().
struct Exchanged {
  at::Tensor rows;
  std::shared_ptr<Work> work;
  void wait() const {
    if (work) work->wait();
  }
};

Exchanged exchange(const at::Tensor& rows, const std::vector<int64_t>& sent,
                   const std::vector<int64_t>& received, const ProcessGroup& group) {
  if (group.size() == 1) return {rows, nullptr};
  Exchanged result{empty_like_rows(rows, total(received)), nullptr};
  result.work = group.all_to_all(result.rows, received, rows.contiguous(), sent);
  return result;
}

// The rows of all ranks, sizes[r] of rank r.
at::Tensor all_rows(const at::Tensor& rows, const std::vector<int64_t>& sizes,
                    const ProcessGroup& group) {
  if (group.size() == 1) return rows;
  const at::Tensor all = empty_like_rows(rows, total(sizes));
  std::vector<std::shared_ptr<Work>> works;
  int64_t first = 0;
  for (int r = 0; r < group.size(); ++r) {
    const at::Tensor part = all.narrow(0, first, sizes[r]);
    if (r == group.rank()) part.copy_(rows);
    if (sizes[r] > 0) works.push_back(group.broadcast(part, r));
    first += sizes[r];
  }
  for (const auto& work : works) work->wait();
  return all;
}

// The sum over ranks, in their order, of the parts that every rank has for this one: sizes[r] rows
// for rank r.
at::Tensor sum_over_ranks(const at::Tensor& rows, const std::vector<int64_t>& sizes,
                          const ProcessGroup& group) {
  if (group.size() == 1) return rows;
  const int64_t n = sizes[group.rank()];
  const std::vector<int64_t> own(group.size(), n);
  const Exchanged parts = exchange(rows, sizes, own, group);
  parts.wait();
  const auto type = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum = parts.rows.narrow(0, 0, n).to(type, /*non_blocking=*/false, /*copy=*/true);
  for (int r = 1; r < group.size(); ++r) sum.add_(parts.rows.narrow(0, r * n, n));
  return sum.to(rows.scalar_type());
}

class AlltoallDispatch final : public TokenDispatch {
 public:
  AlltoallDispatch(const at::Tensor& choices, DispatchCounts counts, const DispatchOptions& options,
                   const ExpertGroups& groups)
      : topk_(choices.size(1)),
        plan_(std::move(counts.plan)),
        groups_(groups),
        order_(order_by_expert(choices, 0, options.num_experts)) {
    order_.choices = order_.choices.narrow(0, 0, plan_.own_rows());
    first_ = make_round(0);
  }

  int64_t rounds() const override { return plan_.rounds(); }
  ExpertCounts counts(int64_t number) override { return round(number).counts; }
  bool communicates() const override { return true; }

  RowsOfRound to_experts(const at::Tensor& x, const at::Tensor& weights) override {
    return [this, x, weights](int64_t number) {
      const Round& r = round(number);
      const at::Tensor choices = own_part(r, order_.choices);
      ExpertRows result;
      result.rows = to_experts(gather_rows(x, choices, topk_), r);
      if (weights.defined())
        result.weights = to_experts(gather_rows(weights.reshape({-1}), choices), r);
      return result;
    };
  }

  ExpertRows from_experts(const RowsOfRound& results) override {
    ExpertRows returned;  // in this rank's source order
    for (int64_t number = 0; number < rounds(); ++number) {
      const ExpertRows rows = results(number);
      const Round& r = round(number);
      const Exchanged back = send_back(rows.rows, r);
      const Exchanged weights = rows.weights.defined() ? send_back(rows.weights, r) : Exchanged();
      if (rows.meanwhile) rows.meanwhile();
      put_back(back, r, returned.rows);
      if (rows.weights.defined()) put_back(weights, r, returned.weights);
    }
    ExpertRows sums;
    sums.rows = sum_rows(returned.rows, order_.rows);
    if (returned.weights.defined()) sums.weights = gather_rows(returned.weights, order_.rows);
    return sums;
  }

 private:
  struct Round {
    int64_t number = -1;
    DispatchRound sizes;
    ExpertCounts counts;
    at::Tensor from_arrival;  // [n]: what arrived at which place is a row
    at::Tensor to_arrival;    // its inverse
  };

  Round make_round(int64_t number) const {
    Round r;
    r.number = number;
    r.sizes = plan_.round(number);
    r.counts = counts_of(r.sizes, order_.rows);
    const at::Tensor shift = on_device_of(order_.rows, r.sizes.run_shift, at::kLong);
    const at::Tensor lengths = on_device_of(order_.rows, r.sizes.run_rows, at::kLong);
    const at::Tensor row = at::arange(r.sizes.rows, order_.rows.options());
    r.from_arrival = row + at::repeat_interleave(shift, lengths, 0, r.sizes.rows);
    r.to_arrival = at::empty_like(r.from_arrival).scatter_(0, r.from_arrival, row);
    return r;
  }

  // Of later rounds only the last one is kept.
  const Round& round(int64_t number) {
    if (number == 0) return first_;
    if (later_.number != number) later_ = make_round(number);
    return later_;
  }

  // The rows of the source order that this rank sends in a round.
  at::Tensor own_part(const Round& r, const at::Tensor& rows) const {
    if (rounds() == 1) return rows;
    std::vector<at::Tensor> parts;
    for (size_t part = 0; part < r.sizes.sent.size(); ++part)
      parts.push_back(rows.narrow(0, r.sizes.sent_begin[part], r.sizes.sent[part]));
    return at::cat(parts);
  }

  at::Tensor to_experts(const at::Tensor& rows, const Round& r) const {
    const Exchanged received = exchange(rows, r.sizes.sent, r.sizes.received, groups_.ep);
    received.wait();
    return gather_rows(all_rows(received.rows, r.sizes.gathered, groups_.etp), r.from_arrival);
  }

  // Starts to return rows to their sources, summed over the expert-tensor ranks.
  Exchanged send_back(const at::Tensor& rows, const Round& r) const {
    const at::Tensor sums =
        sum_over_ranks(gather_rows(rows, r.to_arrival), r.sizes.gathered, groups_.etp);
    return exchange(sums, r.sizes.received, r.sizes.sent, groups_.ep);
  }

  // Writes what came back to `all`, in the source order; the first round allocates it.
  void put_back(const Exchanged& back, const Round& r, at::Tensor& all) const {
    back.wait();
    if (rounds() == 1) {
      all = back.rows;
      return;
    }
    if (!all.defined()) all = empty_like_rows(back.rows, plan_.own_rows());
    int64_t first = 0;
    for (size_t part = 0; part < r.sizes.sent.size(); ++part) {
      const int64_t n = r.sizes.sent[part];
      all.narrow(0, r.sizes.sent_begin[part], n).copy_(back.rows.narrow(0, first, n));
      first += n;
    }
  }

  const int64_t topk_;
  const DispatchPlan plan_;
  const ExpertGroups groups_;
  ExpertOrder order_;  // this rank's tokens in its source order
  Round first_, later_;
};

}  // namespace

std::shared_ptr<TokenDispatch> dispatch_alltoall(const at::Tensor& choices, DispatchCounts counts,
                                                 const DispatchOptions& options,
                                                 const ExpertGroups& groups) {
  return std::make_shared<AlltoallDispatch>(choices, std::move(counts), options, groups);
}

}  // namespace megatron
