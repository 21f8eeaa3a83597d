#include "megatron/models/common/counted_rows.h"

#include <algorithm>

#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows `index` [k] of x [n, h]; zeros where index is n. No other row is taken twice, so that the
// backward writes each gradient once.
struct TakeRows : torch::autograd::Function<TakeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& index) {
    const int64_t rows = x.size(0);
    context->saved_data["rows"] = rows;
    context->save_for_backward({index});
    const at::Tensor taken = x.index_select(0, index.clamp_max(rows - 1));
    return taken.masked_fill_((index == rows).unsqueeze(1), 0.0);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const int64_t rows = context->saved_data["rows"].toInt();
    const at::Tensor index = context->get_saved_variables()[0];
    // A row behind the last one takes what belongs to none.
    const at::Tensor dx = at::zeros({rows + 1, grads[0].size(1)}, grads[0].options());
    dx.index_copy_(0, index, grads[0]);
    return {dx.narrow(0, 0, rows), at::Tensor()};
  }
};

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
  out.hidden = TakeRows::apply(hidden.reshape({rows * b, h}), index).view({m, b, h});
  if (ranks > 1) out.hidden = reduce_scatter_to_sequence_parallel_region(out.hidden, tp);
  return out;
}

}  // namespace megatron
