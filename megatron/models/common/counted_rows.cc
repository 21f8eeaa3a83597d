#include "megatron/models/common/counted_rows.h"

#include <algorithm>

#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

// The positions [b, m] that count, in order, and behind them others.
at::Tensor counted_positions(const at::Tensor& loss_mask, int64_t m) {
  const at::Tensor counted = loss_mask != 0;
  return std::get<1>(at::sort(counted.to(at::kByte), /*stable=*/true, 1, /*descending=*/true))
      .narrow(1, 0, m);
}

}  // namespace

CountedRows counted_rows(const at::Tensor& hidden, const at::Tensor& labels,
                         const at::Tensor& loss_mask, int64_t most, bool sequence_parallel,
                         const ProcessGroup& tp) {
  const int64_t b = labels.size(0), s = labels.size(1), h = hidden.size(2),
                ranks = sequence_parallel ? tp.size() : 1;
  check_shape("loss_mask", loss_mask, {b, s});
  check_shape("hidden states", hidden, {s / ranks, b, h});
  int64_t m = most > 0 ? std::min(most, s) : s;
  m = std::min((m + ranks - 1) / ranks * ranks, s);
  const auto type = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (m == s) return {hidden, labels.t().contiguous(), loss_mask.t().to(type)};
  const at::Tensor positions = counted_positions(loss_mask, m);
  CountedRows out;
  out.labels = labels.gather(1, positions).t().contiguous();
  out.weights = loss_mask.gather(1, positions).t().to(type);
  // This rank's rows are positions [first, first + rows).
  const int64_t rows = hidden.size(0), first = ranks > 1 ? tp.rank() * rows : 0;
  const at::Tensor own = positions.t() - first;
  const at::Tensor samples = at::arange(b, own.options());
  const at::Tensor index =
      at::where((own >= 0).logical_and(own < rows), own * b + samples, rows * b).reshape({-1});
  out.hidden = take_rows(hidden.reshape({rows * b, h}), index).view({m, b, h});
  if (ranks > 1) out.hidden = reduce_scatter_to_sequence_parallel_region(out.hidden, tp);
  return out;
}

}  // namespace megatron
