// Tokens are written into the memory of the ranks of their experts, each once for a rank however
// many of its experts it chose, with the place of each choice's row among them: the receiver makes
// the rows of its experts. Results are written into the memory of their sources, in the order of
// these. Rounds send the row of every choice, straight to its place in the order of the experts.
// Inside of one host. Over the expert-tensor ranks every one gets all rows and returns its part,
// which the source sums in the order of the ranks.
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/peer_rows.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/row_transport.h"

namespace megatron {
namespace {

// Bytes of a number of each row. A slot holds the rows' weights, their places, then rows.
int64_t bytes_of_numbers(int64_t most_rows) {
  constexpr int64_t kWidest = 8, kAlignment = 256;
  return (most_rows * kWidest + kAlignment - 1) / kAlignment * kAlignment;
}

// Tokens of one rank, each once for every part of the experts that it goes to.
struct TokensOnce {
  int64_t parts = 1;
  at::Tensor tokens;  // [m] int64, by part, then by token: token * parts + part
  at::Tensor places;  // [n] int64, of each choice: where its token lies at the receiver
  std::vector<SentRows> runs;
  int64_t arriving = 0;  // from all ranks
  at::Tensor arrived;    // [rows] int64: places of the rows here; undefined: not sent yet
};

TokensOnce tokens_once(const at::Tensor& choices, const ExpertOrder& order,
                       const ExpertOrder& by_part, const DispatchCounts& counts,
                       int64_t experts_of_part) {
  TokensOnce result;
  const DispatchPlan& plan = *counts.tokens;
  result.parts = counts.ranks.ep;
  result.tokens = by_part.choices.narrow(0, 0, plan.own_rows()).clone();
  result.runs = plan.runs(0).to_experts;
  result.arriving = plan.round(0).rows;
  std::vector<int64_t> shift(result.parts, 0);
  for (const SentRows& run : result.runs) shift[run.rank / counts.ranks.etp] = run.to - run.from;
  result.places =
      rows_in_parts(order.choices.narrow(0, 0, counts.plan.own_rows()), choices, by_part.rows,
                    on_device_of(order.rows, shift, at::kLong), experts_of_part);
  return result;
}

class FlexTransport final : public RowTransport {
 public:
  // `once`: null in rounds.
  FlexTransport(std::shared_ptr<PeerRows> memory, const DispatchPlan& plan,
                const DispatchRound& sizes, int64_t expert_tensor_ranks,
                std::shared_ptr<TokensOnce> once)
      : memory_(std::move(memory)),
        runs_(plan.runs(sizes.number)),
        most_rows_(plan.most_rows()),
        rows_(sizes.rows),
        own_rows_(std::accumulate(sizes.sent.begin(), sizes.sent.end(), int64_t{0})),
        etp_(expert_tensor_ranks),
        once_(std::move(once)) {}

  ArrivingRows to_experts(const OwnChoices& own) override {
    if (!once_) return exchange({own.rows(), own.weights, {}}, runs_.to_experts, rows_, 1);
    std::vector<Sent> sent;
    if (own.weights.defined()) sent.push_back({own.weights, begin_of_weights(), runs_.to_experts});
    // The first exchange of a micro-batch sends places, which the later ones have.
    const bool sends_places = !once_->arrived.defined();
    if (sends_places) {
      MEGATRON_ASSERT(once_->places.defined(), "tokens are sent before the places of the first");
      sent.push_back({std::exchange(once_->places, {}), begin_of_places(), runs_.to_experts});
    }
    const at::Tensor tokens = gather_rows(own.x, once_->tokens, once_->parts);
    sent.push_back({tokens, begin_of_rows(), once_->runs});
    return [this, sends_places, open = start(tokens, sent), columns = tokens.size(1),
            type = tokens.scalar_type(),
            weights =
                own.weights.defined() ? std::optional(own.weights.scalar_type()) : std::nullopt] {
      if (sends_places)
        once_->arrived = open->received(begin_of_places(), {rows_}, at::kLong).clone();
      ExpertRows result;
      result.rows = gather_rows(open->received(begin_of_rows(), {once_->arriving, columns}, type),
                                once_->arrived);
      if (weights) result.weights = open->received(begin_of_weights(), {rows_}, *weights).clone();
      open->close();
      return result;
    };
  }

  ArrivingRows back(ExpertRows rows) override {
    return exchange(rows, runs_.back, own_rows_, etp_);
  }

 private:
  struct Sent {
    at::Tensor rows;
    int64_t begin;  // of the receiver's slot
    const std::vector<SentRows>& runs;
  };

  int64_t begin_of_weights() const { return 0; }
  int64_t begin_of_places() const { return bytes_of_numbers(most_rows_); }
  int64_t begin_of_rows() const { return 2 * bytes_of_numbers(most_rows_); }

  // `rows`: the widest of what is sent.
  std::shared_ptr<PeerRowExchange> start(const at::Tensor& rows, const std::vector<Sent>& sent) {
    const auto bytes_of_row = [](const at::Tensor& all) {
      return (all.dim() == 1 ? 1 : all.size(1)) * static_cast<int64_t>(all.element_size());
    };
    memory_->reserve(rows.device(), flex_slot_bytes(most_rows_, bytes_of_row(rows)));
    std::vector<PeerRowExchange::Source> sources;
    for (const Sent& part : sent) {
      const int64_t bytes = bytes_of_row(part.rows);
      sources.push_back({part.rows.contiguous(), {}});
      for (const SentRows& run : part.runs)
        sources.back().pieces.push_back(
            {run.rank, part.begin + run.to * bytes, run.from * bytes, run.rows * bytes});
    }
    return std::make_shared<PeerRowExchange>(*memory_, sources);
  }

  // Sends runs of rows. Of what arrives, `received` rows are the sums of as many parts.
  ArrivingRows exchange(const ExpertRows& from, const std::vector<SentRows>& runs, int64_t received,
                        int64_t parts) {
    std::vector<Sent> sent;
    std::optional<at::ScalarType> weights;
    if (from.weights.defined()) {
      weights = from.weights.scalar_type();
      sent.push_back({from.weights, begin_of_weights(), runs});
    }
    sent.push_back({from.rows, begin_of_rows(), runs});
    return [this, received, parts, weights, open = start(from.rows, sent),
            columns = from.rows.size(1), type = from.rows.scalar_type()] {
      ExpertRows result;
      result.rows =
          sum_of_parts(open->received(begin_of_rows(), {parts * received, columns}, type), parts);
      if (weights)
        result.weights =
            sum_of_parts(open->received(begin_of_weights(), {parts * received}, *weights), parts);
      open->close();
      return result;
    };
  }

  const std::shared_ptr<PeerRows> memory_;
  const DispatchRuns runs_;
  const int64_t most_rows_;
  const int64_t rows_, own_rows_;  // of this rank's experts, and that it sends
  const int64_t etp_;
  const std::shared_ptr<TokensOnce> once_;
};

}  // namespace

int64_t flex_slot_bytes(int64_t rows, int64_t row_bytes) {
  return 2 * bytes_of_numbers(rows) + rows * row_bytes;
}

std::shared_ptr<TokenDispatch> dispatch_flex(const at::Tensor& choices, ExpertOrder order,
                                             const ExpertOrder& by_part, DispatchCounts counts,
                                             const DispatchOptions& options,
                                             const ExpertGroups& groups) {
  const DispatchPlan plan = counts.plan;
  std::shared_ptr<TokensOnce> once;
  if (plan.rounds() == 1)
    once = std::make_shared<TokensOnce>(
        tokens_once(choices, order, by_part, counts, options.num_experts / counts.ranks.ep));
  return dispatch_rows(
      std::move(order), std::move(counts), options,
      [plan, once, memory = groups.memory, etp = groups.etp.size()](const DispatchRound& sizes) {
        return std::make_unique<FlexTransport>(memory, plan, sizes, etp, once);
      });
}

}  // namespace megatron
