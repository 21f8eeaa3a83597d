// Exchange of tokens between the ranks that hold one set of experts: rows to their experts, results
// back to their tokens.
//
// Every rank of the group brings its own tokens, any number of them, and takes part in every
// exchange, with or without rows. The order of an expert's rows is that of DispatchPlan, the sum
// over a token's choices is taken in a fixed order in fp32 (fp64) and rounded once, with what it is
// added to: results are the same in every run.
//
//   alltoall   rows travel to their experts and back, each once; sums in the order of the choices
//   flex       a token travels once to each rank with experts of its choices, which makes the rows
//              of these; results are written straight to their places in the source's memory.
//              Inside of one host
//   allgather  all tokens travel to all ranks, which return fp32 sums over their own experts, in
//              the order of the experts
//
// One rank exchanges nothing and does not wait for the device.
// Source: GShard (arXiv:2006.16668), Megatron-LM's token_dispatcher.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/transformer/config/moe/moe_dispatch.h"

namespace megatron {

class PeerMailbox;
class PeerRows;
struct ParallelGroups;
struct TransformerConfig;

// The ranks that hold one set of experts.
struct ExpertGroups {
  ProcessGroup ep, etp;
  ProcessGroup all;  // both, expert-tensor ranks fastest
  // Where rows of `flex` arrive; null with one rank. The groups that are made of the same ranks at
  // one time share it.
  std::shared_ptr<PeerRows> memory;
  // Holds what is postponed until the next exchange; likewise.
  std::shared_ptr<PeerMailbox> mailbox;
};
ExpertGroups expert_groups(const ParallelGroups& groups);

// Shares the memory of `flex` between the ranks of experts, for as long as the result or a model
// made meanwhile holds it; null if no tokens are written into it. Collective. Throws Error if the
// ranks cannot reach each other's.
std::shared_ptr<PeerRows> open_expert_rows(const TransformerConfig& config,
                                           const ParallelGroups& groups, at::Device device);

struct DispatchOptions {
  TokenDispatcherType type = TokenDispatcherType::kAlltoall;
  int64_t num_experts = 1;
  // Most rows that a rank holds at a time, as a multiple of its share under perfect balance; 0: no
  // bound. More are exchanged and computed in rounds.
  double rank_capacity_factor = 0.0;
  // With padding to a capacity: the choices in columns from `topk` on only fill experts, so that
  // each has `capacity` choices of this rank; what their rows give is not used.
  bool padded = false;
  int64_t topk = 0, capacity = 0;
  bool dropless = true;  // every choice is that of an expert
};

// How many rows the experts of this rank have in a round.
struct ExpertCounts {
  at::Tensor rows;    // [E/e] int32
  at::Tensor before;  // [E/e] int64 on the CPU: in all rounds before it; undefined: none
};

// Rows of the experts of this rank, by expert, and one number of each.
struct ExpertRows {
  at::Tensor rows;     // [n, c]
  at::Tensor weights;  // [n] fp32 (fp64); undefined: none
  // Results only: work for this rank to do while they are exchanged; may be null
  std::function<void()> meanwhile;
};
// Of round 0, 1, ..., in that order and each at most once.
using RowsOfRound = std::function<ExpertRows(int64_t round)>;

// The exchanges of one micro-batch, in its forward and backward. Not differentiable: one is the
// transpose of the other. Both are collective over the group.
class TokenDispatch {
 public:
  virtual ~TokenDispatch() = default;
  // The same on all ranks of the group.
  virtual int64_t rounds() const = 0;
  virtual ExpertCounts counts(int64_t round) = 0;
  // Whether to_experts() communicates: what it gives is worth keeping.
  virtual bool communicates() const = 0;

  // The row of each choice, and the weight. `now`: the exchange of round 0 starts here, not when
  // the result is called, and is then waited for; round 0 must be called.
  //   x [R, c]; weights [R, k] or undefined
  virtual RowsOfRound to_experts(const at::Tensor& x, const at::Tensor& weights, bool now) = 0;
  // Sums of the rows of each token, [R, c] in the type of the rows; summed over the expert-tensor
  // ranks, and added to `base` [R, c] if that is defined. And the numbers of the choices, [R, k],
  // if there are any.
  virtual ExpertRows from_experts(const RowsOfRound& results, const at::Tensor& base) = 0;
};

// Bytes of an exchange of `flex` in which no rank receives more than `rows` of `row_bytes`.
int64_t flex_slot_bytes(int64_t rows, int64_t row_bytes);

//   choices [R, k] int32: each at most once in a row; -1: dropped
// Waits for the device if there are several ranks: all counts are exchanged.
std::shared_ptr<TokenDispatch> dispatch_tokens(const at::Tensor& choices,
                                               const DispatchOptions& options,
                                               const ExpertGroups& groups);

}  // namespace megatron
