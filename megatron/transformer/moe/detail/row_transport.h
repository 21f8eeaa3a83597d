// Dispatch in which the row of every choice travels to the ranks of its expert and back.
#pragma once

#include <functional>
#include <memory>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/transformer/moe/detail/token_dispatch.h"

namespace megatron {

// Choices of this rank's tokens, in its source order.
struct OwnChoices {
  at::Tensor x;        // [R, c]: tokens
  at::Tensor choices;  // [n] int64: token * of_token + place in its choices
  int64_t of_token = 1;
  at::Tensor weights;  // [n]; undefined: none
  at::Tensor rows() const { return gather_rows(x, choices, of_token); }
};

// Rows on their way, with or without a number of each; called once, waits for them.
using ArrivingRows = std::function<ExpertRows()>;

// How rows travel in one round. Both functions start an exchange of all ranks of the group.
class RowTransport {
 public:
  virtual ~RowTransport() = default;
  // Rows of tokens, for what this rank sends, to the order of the experts.
  virtual ArrivingRows to_experts(const OwnChoices& own) = 0;
  // The transpose, from a row of each choice; summed over the expert-tensor ranks.
  virtual ArrivingRows back(ExpertRows rows) = 0;
};
using TransportOfRound = std::function<std::unique_ptr<RowTransport>(const DispatchRound&)>;

std::shared_ptr<TokenDispatch> dispatch_rows(ExpertOrder order, DispatchCounts counts,
                                             const DispatchOptions& options,
                                             TransportOfRound transport);

// `rows` [n, ...] with another n.
at::Tensor empty_like_rows(const at::Tensor& rows, int64_t n);

}  // namespace megatron
