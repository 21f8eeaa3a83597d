// Low-rank adapters of parallel linears: Y = X W^T + scale * (X A^T) B^T with W frozen.
//
//                    A [adapters * r, k]                     B [rows, r]
//   column-parallel  replicated; gradients are partial sums  rows over kTensor, as W's
//   row-parallel     columns over kTensor, as W's            replicated; gradients are partial sums
//   not divided      whole, with gradients as W's            whole, with gradients as W's
//
// Adapters use the linear's own collectives; the only additional one is the sum of the partial
// gradients at the end of a step.
//
// A fused linear (queries, keys and values; gate and up) has one adapter for all of its rows, or
// separate adapters for some of its parts. Separate adapters are computed as one of rank adapters *
// r, in which B is zero where a row belongs to another adapter.
// Source: Hu et al. 2021 (arXiv:2106.09685).
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter.h"

namespace megatron {

struct LoraOptions {
  int64_t rank = 0;  // 0: no adapter
  double scale = 1.0;
  int adapters = 1;
  // For each row of the whole linear: the index of its adapter, or -1. Empty: one adapter for all
  // rows.
  std::vector<int8_t> adapter_of_row = {};
};

// While it lives, linears of this thread compute without their adapters, as the base model. For
// forward passes without a backward.
class AdaptersOff {
 public:
  AdaptersOff();
  ~AdaptersOff();
  AdaptersOff(const AdaptersOff&) = delete;
  AdaptersOff& operator=(const AdaptersOff&) = delete;
};

// The adapter of one linear, called by the linear's forward and backward.
class LoraAdapter {
 public:
  // `weight`: the linear's weight, complete except for its name and storage. Throws Error when the
  // rows of some parts cannot be split over the ranks like the weight's.
  LoraAdapter(const Parameter& weight, const LoraOptions& options, const ParallelGroups& groups);

  // y += scale * (x A^T) B^T in place; nothing under AdaptersOff.
  //   x [..., k of this rank], y [..., rows of this rank] contiguous
  void add_output(const at::Tensor& x, const at::Tensor& y);
  // The same of some of the rows of x and y as matrices, `rows` [m] int64.
  void add_output(const at::Tensor& x, const at::Tensor& y, const at::Tensor& rows);
  // W + scale * B A, for those who multiply with the weight itself; W under AdaptersOff.
  //   w [rows of this rank, k of this rank]
  at::Tensor added_to(const at::Tensor& w);
  // dx += dz A in place, with dz = scale * dy B, which is returned: [tokens, adapters * r].
  at::Tensor add_input_grad(const at::Tensor& dy, const at::Tensor& dx);
  // The gradients of A and B: now, or later as a separate action of a zero-bubble schedule. `x` is
  // called when they are computed.
  void accumulate_grads(const at::Tensor& dy, const at::Tensor& dz, std::function<at::Tensor()> x);

  Parameter a, b;

 private:
  at::Tensor inner(const at::Tensor& x);   // scale * x A^T  [tokens, adapters * r]
  at::Tensor spread(const at::Tensor& b);  // B with zeros in the columns of other adapters
  void accumulate(const at::Tensor& dy, const at::Tensor& dz, const at::Tensor& x);

  const int64_t rank_, adapters_, rows_;  // rows_: rows of the linear on this rank
  const double scale_;
  at::Tensor slots_;  // row index in [rows * adapters, r] of each row of B; undefined: one adapter
};

// Adapters of several sequences in one forward without a backward: which rows of the batch take
// which adapter. While it lives, it holds for the linears of this thread; they have no adapter of
// their own.
class RowAdapters {
 public:
  // The adapters of one adapter's linears, by their weights.
  using Linears = std::unordered_map<const Parameter*, LoraAdapter*>;
  struct Group {
    const Linears* linears = nullptr;
    at::Tensor rows;  // [m] int64 of the rows of the batch
  };
  explicit RowAdapters(std::vector<Group> groups);
  ~RowAdapters();
  RowAdapters(const RowAdapters&) = delete;
  RowAdapters& operator=(const RowAdapters&) = delete;

  // Of this thread; null: there are none.
  static const RowAdapters* current();
  bool adapts(const Parameter& weight) const;
  // y += scale * (x A^T) B^T in place, for each group by its own A and B of that weight.
  void add_output(const Parameter& weight, const at::Tensor& x, const at::Tensor& y) const;

 private:
  const std::vector<Group> groups_;
  const RowAdapters* const outer_;
};

}  // namespace megatron
