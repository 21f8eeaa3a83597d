// Products of linear layers with sequence parallelism or divided rows (divided_rows.h), overlapped
// with their communication: a rank multiplies the rows it has while it receives the others, and
// sends finished rows while it multiplies the next. Not differentiable; the layers write their own
// backwards.
//
// Rows are exchanged through the mailbox of the group (comm/peer_mailbox.h) if they fit into it,
// and by collectives otherwise. `mailbox` may be null.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/process_group.h"
#include "megatron/tensor/quantization.h"

namespace megatron {

// An all-gather over dim 0 in flight: x [s/t, ...] of all ranks to [s, ...]. This object owns the
// result: submit work that reads it to the current stream before the object is destroyed.
class GatheredRows {
 public:
  // `with_own`: the result is needed as one tensor that includes this rank's rows.
  GatheredRows(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox* mailbox,
               bool with_own = true);
  const at::Tensor& own() const { return own_; }
  // Whether rows arrive rank by rank, starting with the rank before this one.
  bool in_parts() const { return exchange_.has_value(); }
  // Whether postponed weight gradients hide the whole transfer, so that all rows are best awaited
  // as one tensor.
  bool hidden() const;
  // Waits for the rows of `count` ranks and returns them.
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

// Whether the postponed weight gradients take as long as sending a tensor like `part` to every
// other rank.
bool hides_exchange(const PeerMailbox& mailbox, const at::Tensor& part, const ProcessGroup& tp);

// A reduce-scatter over dim 0 in flight, of at most kMaxSumParts ranks.
class ScatteredRows {
 public:
  // `rows` [s/t, ...]: has the shape and type of one rank's result.
  ScatteredRows(const at::Tensor& rows, const ProcessGroup& tp, PeerMailbox* mailbox);
  // Sends this rank's summand of another rank's rows; call for the ranks after this one in ring
  // order.
  void send(int to, const at::Tensor& rows);
  // Sums in fp32 (fp64), in rank order, then adds `addend` if it is defined, and rounds once. `sum`
  // may be `own`.
  void finish(const at::Tensor& own, const at::Tensor& sum, const at::Tensor& addend = {});

 private:
  const ProcessGroup& tp_;
  std::optional<PeerExchange> exchange_;
  std::vector<at::Tensor> parts_;  // by rank
  std::vector<std::shared_ptr<Work>> works_;
};

// Reduce-scatter of x [s, ...] into `part` [s/t, ...], this rank's rows; returns it in flight. At
// most kMaxSumParts ranks where the mailbox is used.
std::shared_ptr<Work> scatter_rows(const at::Tensor& x, const at::Tensor& part,
                                   const ProcessGroup& tp, PeerMailbox* mailbox);

// x w^T (+ bias) for the rows of all ranks. x [s/t, ..., k], w [n, k]; returns [s, ..., n].
// Communication: all-gather, overlapped with the product of this rank's rows.
at::Tensor gathered_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                   const ProcessGroup& tp, PeerMailbox* mailbox);

// dy w for the rows of all ranks, and the gathered dy. dy [s/t, ..., n], w [n, k]; returns [s, ...,
// k]. `gelu_input` [s, ..., k] or undefined: see linear_input_grad(). Communication: as above.
at::Tensor gathered_linear_input_grad(GatheredRows& dy, const at::Tensor& w, const ProcessGroup& tp,
                                      const at::Tensor& gelu_input = {});

// Of x [s/t, k] and w [n, k] in codes, x with a scale for each row; returns [s, n] in `type`. Codes
// and scales are exchanged.
at::Tensor gathered_quantized_forward(const QuantizedMatrix& x, const QuantizedMatrix& w,
                                      at::ScalarType type, const at::Tensor& bias,
                                      const ProcessGroup& tp, PeerMailbox* mailbox);

// Reduce-scatter of x w^T: this rank's rows of the sum over the ranks, plus addend if it is
// defined. x [s, ..., k], w [n, k]; addend and result [s/t, ..., n]; while rows are divided s need
// not be a multiple of t. At most kMaxSumParts ranks and addends together. Communication: each
// other rank's rows are sent while the next ones are multiplied.
at::Tensor scattered_linear_forward(const at::Tensor& x, const at::Tensor& w,
                                    const ProcessGroup& tp, PeerMailbox* mailbox,
                                    const at::Tensor& addend = {});
// Of x [s, k] and w [n, k] in codes, x with a scale for each row; the result [s/t, n] in `type`.
at::Tensor scattered_quantized_forward(const QuantizedMatrix& x, const QuantizedMatrix& w,
                                       at::ScalarType type, const ProcessGroup& tp,
                                       PeerMailbox* mailbox, const at::Tensor& addend = {});

}  // namespace megatron
