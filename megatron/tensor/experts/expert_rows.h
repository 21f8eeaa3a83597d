// Tokens in the order of experts: every choice of an expert becomes a row, and the rows of one
// expert are contiguous. Everything here is a gather: results are the same in every run. Nothing
// waits for the device. Not differentiable: the layers write their own backwards.
//
//   choices  [R, k] int32 or int64: the experts of each token, at most once each; numbers outside
//            the experts that are asked for stand for choices that are dropped or of other ranks
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megatron {

struct ExpertOrder {
  at::Tensor counts;  // [E] int32: rows of each expert
  // [R k] int64: the choice (token * k + place in its choices) that each row stands for, by expert,
  // then by token; dropped choices come last
  at::Tensor choices;
  at::Tensor rows;  // [R, k] int64: the row of each choice; -1: dropped
};

// The order of the choices of experts first_expert ... first_expert + num_experts - 1.
ExpertOrder order_by_expert(const at::Tensor& choices, int64_t first_expert, int64_t num_experts);

// Which parts of the experts, of `experts_of_part` each, a token's choices are of: [R, parts]
// int32, p in column p, or -1. The order of these by part has each token once for each part that it
// goes to.
at::Tensor parts_of_choices(const at::Tensor& choices, int64_t num_parts, int64_t experts_of_part);

// The row of each choice's token in an order by part, moved by the part's shift.
//   order [n]: choices as in ExpertOrder, none dropped; token_rows [R, parts]: `rows` of the order
//   by part; shift [parts] int64; return [n] int64
at::Tensor rows_in_parts(const at::Tensor& order, const at::Tensor& choices,
                         const at::Tensor& token_rows, const at::Tensor& shift,
                         int64_t experts_of_part);

// y[i] = x[index[i] / divisor], 0 where an index is negative. With divisor k and the choices of an
// order the rows of the experts.
//   x [n, ...], index int64 of any shape; return [index's shape, ...]
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index, int64_t divisor = 1);

// y[places[i, j]] = x[i]: what gather_rows() makes of the choices of an order, but each row of x is
// read once. The places must be all of 0 ... R k - 1, so nothing may be dropped.
//   x [R, ...], places [R, k] int64; return [R k, ...]
at::Tensor spread_rows(const at::Tensor& x, const at::Tensor& places);

// sums[i] = base[i] + sum over j of rows[places[i, j]], one j after the other, -1 skipped, in fp32
// (fp64) and rounded once.
//   rows [n, c], places [R, k] int64, base [R, c] in the type of the rows, undefined: zeros; return
//   as base
at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& base = {});

// sums[i] += sum over j of rows[places[i, j]], one j after the other, -1 skipped.
//   rows [n, c], places [R, k] int64, sums [R, c] fp32 (fp64)
void add_rows(const at::Tensor& rows, const at::Tensor& places, at::Tensor sums);

// The expert of each of n rows, [n] int64; rows after the last expert's count as the last one's.
at::Tensor experts_of_rows(const at::Tensor& counts, int64_t n);

// target_e = beta * target_e + sum of the rows of expert e, each times its scale if there are
// scales.
//   rows [n, c], counts [E], scales [n] or undefined, target [E, c] fp32 (fp64)
void sum_rows_of_experts(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& scales,
                         at::Tensor target, double beta);

}  // namespace megatron
