// Rows of a forward without a backward that tensor ranks divide among them between the products, as
// sequence parallelism does in training, for any number of rows. A rank then sums, normalises and
// adds for its rows alone, and exchanges overlap with the products.
//
// Goal: steps of a server with many rows, whose sums over the ranks would be waited for. Non-goals:
// training (--sequence-parallel), layers that decide at construction whether rows are divided
// (experts, latent attention, recurrences).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// While it lives, linear layers of this thread whose weights are divided over tensor ranks take
// (ColumnParallelLinear) and return (RowParallelLinear) the rows of this rank: [count, ...] of
// [rows, ...]. All ranks begin and end it alike, and none is inside another.
class DividedRows {
 public:
  // Of one rank, if there are so many; the number is a multiple of what quantised products need.
  static int64_t count_of(int64_t rows, int ranks);
  static const DividedRows* current();  // null: rows are not divided

  DividedRows(int64_t rows, const ProcessGroup& tp);
  ~DividedRows();
  DividedRows(const DividedRows&) = delete;
  DividedRows& operator=(const DividedRows&) = delete;

  int64_t count() const { return count_; }
  // x [rows, ...], the same on all ranks; returns [count, ...], zeros behind the last row.
  at::Tensor own(const at::Tensor& x) const;
  // x [rows or more, ...] with zeros behind: [t * count, ...]
  at::Tensor filled(const at::Tensor& x) const;
  // The rows of y [t * count, ...] that there are: a view [rows, ...]
  at::Tensor without_filling(const at::Tensor& y) const { return y.narrow(0, 0, rows_); }
  // All rows [rows, ...] of what each rank has [count, ...]. Communication: all-gather over tp.
  at::Tensor all(const at::Tensor& own) const;

 private:
  const int64_t rows_, count_;
  const ProcessGroup& tp_;
};

}  // namespace megatron
