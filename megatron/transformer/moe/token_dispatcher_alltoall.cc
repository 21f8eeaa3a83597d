// Rows travel to the ranks of their experts and back by all-to-all. Over the expert-tensor ranks,
// which hold parts of the same experts, rows are gathered and results summed in the order of the
// ranks.
#include <numeric>
#include <utility>

#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/row_transport.h"

namespace megatron {
namespace {

int64_t total(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// An exchange in flight: its result is there after wait().
struct Exchanged {
  at::Tensor rows;
  std::shared_ptr<Work> work;
  const at::Tensor& wait() const {
    if (work) work->wait();
    return rows;
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
  return sum_of_parts(exchange(rows, sizes, own, group).wait(), group.size());
}

class AlltoallTransport final : public RowTransport {
 public:
  // `like`: a tensor on the device of the rows.
  AlltoallTransport(const ExpertGroups& groups, const DispatchRound& sizes, const at::Tensor& like)
      : groups_(groups), sent_(sizes.sent), received_(sizes.received), gathered_(sizes.gathered) {
    const at::Tensor shift = on_device_of(like, sizes.run_shift, at::kLong);
    const at::Tensor lengths = on_device_of(like, sizes.run_rows, at::kLong);
    const at::Tensor row = at::arange(sizes.rows, like.options());
    from_arrival_ = row + at::repeat_interleave(shift, lengths, 0, sizes.rows);
    to_arrival_ = at::empty_like(from_arrival_).scatter_(0, from_arrival_, row);
  }

  ArrivingRows to_experts(const OwnChoices& own) override {
    const auto start = [&](const at::Tensor& rows) {
      return rows.defined() ? exchange(rows, sent_, received_, groups_.ep) : Exchanged();
    };
    return [this, x = start(own.rows()), weights = start(own.weights)]() mutable {
      ExpertRows result;
      result.rows = by_expert(std::move(x));
      if (weights.rows.defined()) result.weights = by_expert(std::move(weights));
      return result;
    };
  }

  ArrivingRows back(ExpertRows rows) override {
    const auto start = [&](at::Tensor own) {
      if (!own.defined()) return Exchanged();
      own = gather_rows(own, to_arrival_);
      return exchange(sum_over_ranks(own, gathered_, groups_.etp), received_, sent_, groups_.ep);
    };
    return [y = start(std::move(rows.rows)), weights = start(std::move(rows.weights))] {
      ExpertRows result;
      result.rows = y.wait();
      if (weights.rows.defined()) result.weights = weights.wait();
      return result;
    };
  }

 private:
  at::Tensor by_expert(Exchanged received) const {
    received.wait();
    received.rows = all_rows(received.rows, gathered_, groups_.etp);
    return gather_rows(received.rows, from_arrival_);
  }

  const ExpertGroups groups_;
  const std::vector<int64_t> sent_, received_, gathered_;
  at::Tensor from_arrival_;  // [n]: what arrived at which place is a row
  at::Tensor to_arrival_;    // its inverse
};

}  // namespace

std::shared_ptr<TokenDispatch> dispatch_alltoall(ExpertOrder order, DispatchCounts counts,
                                                 const DispatchOptions& options,
                                                 const ExpertGroups& groups) {
  const at::Tensor like = order.rows;
  return dispatch_rows(std::move(order), std::move(counts), options,
                       [groups, like](const DispatchRound& sizes) {
                         return std::make_unique<AlltoallTransport>(groups, sizes, like);
                       });
}

}  // namespace megatron
