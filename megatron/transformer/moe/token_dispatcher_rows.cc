#include <utility>
#include <vector>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/row_transport.h"

namespace megatron {
namespace {

class RowsDispatch final : public TokenDispatch {
 public:
  RowsDispatch(ExpertOrder order, DispatchCounts counts, const DispatchOptions& options,
               TransportOfRound transport)
      : topk_(order.rows.size(1)),
        plan_(std::move(counts.plan)),
        order_(std::move(order)),
        summed_(without_padding(order_.rows, options)),
        transport_(std::move(transport)) {
    order_.choices = order_.choices.narrow(0, 0, plan_.own_rows());
    if (options.padded) order_.choices = order_.choices.clone();
    first_ = make_round(0);
  }

  int64_t rounds() const override { return plan_.rounds(); }
  ExpertCounts counts(int64_t number) override { return round(number).counts; }
  bool communicates() const override { return true; }

  RowsOfRound to_experts(const at::Tensor& x, const at::Tensor& weights, bool now) override {
    ArrivingRows first;
    if (now) first = start(x, weights, first_);
    const bool reads_again = !now || rounds() > 1;
    return [this, first = std::move(first), x = reads_again ? x : at::Tensor(),
            weights = reads_again ? weights : at::Tensor()](int64_t number) mutable {
      return number == 0 && first ? std::exchange(first, nullptr)()
                                  : start(x, weights, round(number))();
    };
  }

  ExpertRows from_experts(const RowsOfRound& results, const at::Tensor& base) override {
    ExpertRows returned;  // in this rank's source order
    for (int64_t number = 0; number < rounds(); ++number) {
      ExpertRows rows = results(number);
      const std::function<void()> meanwhile = std::exchange(rows.meanwhile, nullptr);
      const Round& r = round(number);
      const ArrivingRows back = r.transport->back(std::move(rows));
      if (meanwhile) meanwhile();
      const ExpertRows arrived = back();
      put_back(arrived.rows, r, returned.rows);
      if (arrived.weights.defined()) put_back(arrived.weights, r, returned.weights);
    }
    ExpertRows sums;
    sums.rows = sum_rows(returned.rows, summed_, base);
    if (returned.weights.defined()) sums.weights = gather_rows(returned.weights, order_.rows);
    return sums;
  }

 private:
  struct Round {
    DispatchRound sizes;
    ExpertCounts counts;
    std::unique_ptr<RowTransport> transport;
  };

  Round make_round(int64_t number) const {
    Round r;
    r.sizes = plan_.round(number);
    r.counts = counts_of(r.sizes, order_.rows);
    r.transport = transport_(r.sizes);
    return r;
  }

  // Of later rounds only the last one is kept.
  const Round& round(int64_t number) {
    if (number == 0) return first_;
    if (later_.sizes.number != number) later_ = make_round(number);
    return later_;
  }

  ArrivingRows start(const at::Tensor& x, const at::Tensor& weights, const Round& r) const {
    OwnChoices own{x, own_part(r, order_.choices), topk_, {}};
    if (weights.defined()) own.weights = gather_rows(weights.reshape({-1}), own.choices);
    return r.transport->to_experts(own);
  }

  // The rows of the source order that this rank sends in a round.
  at::Tensor own_part(const Round& r, const at::Tensor& rows) const {
    if (rounds() == 1) return rows;
    std::vector<at::Tensor> parts;
    for (size_t part = 0; part < r.sizes.sent.size(); ++part)
      parts.push_back(rows.narrow(0, r.sizes.sent_begin[part], r.sizes.sent[part]));
    return at::cat(parts);
  }

  // Writes what came back to `all`, in the source order; the first round allocates it.
  void put_back(const at::Tensor& back, const Round& r, at::Tensor& all) const {
    if (rounds() == 1) {
      all = back;
      return;
    }
    if (!all.defined()) all = empty_like_rows(back, plan_.own_rows());
    int64_t first = 0;
    for (size_t part = 0; part < r.sizes.sent.size(); ++part) {
      const int64_t n = r.sizes.sent[part];
      all.narrow(0, r.sizes.sent_begin[part], n).copy_(back.narrow(0, first, n));
      first += n;
    }
  }

  const int64_t topk_;
  const DispatchPlan plan_;
  ExpertOrder order_;        // this rank's tokens in its source order
  const at::Tensor summed_;  // the rows of each token's sum
  const TransportOfRound transport_;
  Round first_, later_;
};

}  // namespace

at::Tensor empty_like_rows(const at::Tensor& rows, int64_t n) {
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = n;
  return at::empty(shape, rows.options());
}

std::shared_ptr<TokenDispatch> dispatch_rows(ExpertOrder order, DispatchCounts counts,
                                             const DispatchOptions& options,
                                             TransportOfRound transport) {
  return std::make_shared<RowsDispatch>(std::move(order), std::move(counts), options,
                                        std::move(transport));
}

}  // namespace megatron
