// Rows are written into the memory of the ranks of their experts, in the order of these, and
// results into that of their sources: no rank permutes what arrives. Inside of one host. Over the
// expert-tensor ranks every one gets all rows and returns its part, which the source sums in the
// order of the ranks.
#include <numeric>
#include <optional>
#include <utility>

#include "megatron/comm/peer_rows.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/detail/row_transport.h"

namespace megatron {
namespace {

// Bytes of a slot before its rows: a number for each of them.
int64_t bytes_of_numbers(int64_t most_rows) {
  constexpr int64_t kWidest = 8, kAlignment = 256;
  return (most_rows * kWidest + kAlignment - 1) / kAlignment * kAlignment;
}

class FlexTransport final : public RowTransport {
 public:
  FlexTransport(std::shared_ptr<PeerRows> memory, const DispatchPlan& plan,
                const DispatchRound& sizes, int64_t expert_tensor_ranks)
      : memory_(std::move(memory)),
        runs_(plan.runs(sizes.number)),
        most_rows_(plan.most_rows()),
        rows_(sizes.rows),
        own_rows_(std::accumulate(sizes.sent.begin(), sizes.sent.end(), int64_t{0})),
        etp_(expert_tensor_ranks) {}

  ArrivingRows to_experts(ExpertRows rows) override {
    return exchange(rows, runs_.to_experts, rows_, /*parts=*/1);
  }
  ArrivingRows back(ExpertRows rows) override {
    return exchange(rows, runs_.back, own_rows_, etp_);
  }

 private:
  // Sends runs of rows. Of what arrives, `received` rows are the sums of as many parts.
  ArrivingRows exchange(const ExpertRows& from, const std::vector<SentRows>& runs, int64_t received,
                        int64_t parts) {
    const at::Tensor rows = from.rows.contiguous();
    const int64_t row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size());
    const int64_t begin = bytes_of_numbers(most_rows_);
    memory_->reserve(rows.device(), flex_slot_bytes(most_rows_, row_bytes));
    std::vector<PeerRowExchange::Source> sources;
    const auto add = [&](const at::Tensor& all, int64_t first_byte, int64_t bytes) {
      sources.push_back({all, {}});
      for (const SentRows& run : runs)
        sources.back().pieces.push_back(
            {run.rank, first_byte + run.to * bytes, run.from * bytes, run.rows * bytes});
    };
    std::optional<at::ScalarType> numbers;
    if (from.weights.defined()) {
      numbers = from.weights.scalar_type();
      add(from.weights.contiguous(), 0, static_cast<int64_t>(from.weights.element_size()));
    }
    add(rows, begin, row_bytes);
    const auto open = std::make_shared<PeerRowExchange>(*memory_, sources);
    return [open, begin, received, parts, numbers, columns = rows.size(1),
            type = rows.scalar_type()] {
      ExpertRows result;
      result.rows = sum_of_parts(open->received(begin, {parts * received, columns}, type), parts);
      if (numbers)
        result.weights = sum_of_parts(open->received(0, {parts * received}, *numbers), parts);
      open->close();
      return result;
    };
  }

  const std::shared_ptr<PeerRows> memory_;
  const DispatchRuns runs_;
  const int64_t most_rows_;
  const int64_t rows_, own_rows_;  // of this rank's experts, and that it sends
  const int64_t etp_;
};

}  // namespace

int64_t flex_slot_bytes(int64_t rows, int64_t row_bytes) {
  return bytes_of_numbers(rows) + rows * row_bytes;
}

std::shared_ptr<TokenDispatch> dispatch_flex(ExpertOrder order, DispatchCounts counts,
                                             const DispatchOptions& options,
                                             const ExpertGroups& groups) {
  const DispatchPlan plan = counts.plan;
  return dispatch_rows(
      std::move(order), std::move(counts), options,
      [plan, memory = groups.memory, etp = groups.etp.size()](const DispatchRound& sizes) {
        return std::make_unique<FlexTransport>(memory, plan, sizes, etp);
      });
}

}  // namespace megatron
