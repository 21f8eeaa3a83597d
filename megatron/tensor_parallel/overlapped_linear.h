// Products of linear layers with sequence parallelism, in parts of the sequence: what a rank has is
// multiplied while the rest is on its way, what is ready leaves while the rest is multiplied.
// Not differentiable; the layers write their own backwards.
//
// Rows travel through the mailbox of the group (comm/peer_mailbox.h) where they fit into it, and by
// collectives otherwise. `mailbox` may be null.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// An all-gather over dim 0 under way: x [s/t, ...] of all ranks to [s, ...], which belongs to this
// object: what uses it is given to the current stream while the object is there.
class GatheredRows {
 public:
  // `with_own`: all rows are needed in one piece, this rank's as well.
  GatheredRows(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox* mailbox,
               bool with_own = true);
  const at::Tensor& own() const { return own_; }
  // Whether the ranks' rows arrive one after the other, those of the ranks before this one first.
  bool in_parts() const { return exchange_.has_value(); }
  // Whether what was postponed hides the way of the others' rows, and this rank's can be had with
  // them.
  bool hidden() const;
  // The rows of `count` ranks.
  at::Tensor wait(int first_rank, int count);
  at::Tensor wait() { return wait(0, tp_.size()); }

 private:
  const ProcessGroup& tp_;
  const PeerMailbox* const mailbox_;
  const bool with_own_;
  at::Tensor own_, whole_;
  std::shared_ptr<Work> work_;
  std::optional<PeerExchange> exchange_;
};

// Whether what was postponed takes as long as the way of parts like this one to each other rank.
bool hides_exchange(const PeerMailbox& mailbox, const at::Tensor& part, const ProcessGroup& tp);

// A sum over the ranks, at most kMaxSumParts, under way; each rank gets its rows.
class ScatteredRows {
 public:
  // `rows` [s/t, ...]: like what one rank gets.
  ScatteredRows(const at::Tensor& rows, const ProcessGroup& tp, PeerMailbox* mailbox);
  // This rank's summand of another rank's rows: of the ranks behind this one in turn.
  void send(int to, const at::Tensor& rows);
  // Summed in fp32 (fp64), in the order of the ranks and `addend`, if that is defined, behind them,
  // and rounded once. `sum` may be `own`.
  void finish(const at::Tensor& own, const at::Tensor& sum, const at::Tensor& addend = {});

 private:
  const ProcessGroup& tp_;
  std::optional<PeerExchange> exchange_;
  std::vector<at::Tensor> parts_;  // by rank
  std::vector<std::shared_ptr<Work>> works_;
};

// The sum over the ranks, at most kMaxSumParts where the mailbox is used, of x [s, ...], under way;
// `part` [s/t, ...] becomes this rank's rows.
std::shared_ptr<Work> scatter_rows(const at::Tensor& x, const at::Tensor& part,
                                   const ProcessGroup& tp, PeerMailbox* mailbox);

// x w^T (+ bias) of all rows. x [s/t, ..., k], w [n, k]; returns [s, ..., n].
// Communication: all-gather, under the product of this rank's rows.
at::Tensor gathered_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                   const ProcessGroup& tp, PeerMailbox* mailbox);

// dy w of all rows, and all rows of dy. dy [s/t, ..., n], w [n, k]; returns [s, ..., k].
// `gelu_input` [s, ..., k] or undefined: as for linear_input_grad(). Communication: as above.
at::Tensor gathered_linear_input_grad(GatheredRows& dy, const at::Tensor& w, const ProcessGroup& tp,
                                      const at::Tensor& gelu_input = {});

// This rank's rows of the sum of x w^T over the ranks, + addend, if that is defined. x [s, ..., k],
// w [n, k]; addend and what is returned [s/t, ..., n]. At most kMaxSumParts ranks and addends.
// Communication: the rows of every other rank go there, under the product of the next ones.
at::Tensor scattered_linear_forward(const at::Tensor& x, const at::Tensor& w,
                                    const ProcessGroup& tp, PeerMailbox* mailbox,
                                    const at::Tensor& addend = {});

}  // namespace megatron
