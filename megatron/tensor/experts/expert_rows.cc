#include "megatron/tensor/experts/expert_rows.h"

#include "megatron/base/check.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

ExpertOrder order_by_expert(const at::Tensor& choices, int64_t first_expert, int64_t num_experts) {
  const at::NoGradGuard no_grad;
  check_shape("choices of experts", choices, {-1, -1});
  const at::Tensor local = choices.reshape({-1}).to(at::kLong).sub(first_expert);
  const at::Tensor chosen = local.ge(0).logical_and(local.lt(num_experts));
  const at::Tensor expert = at::where(chosen, local, num_experts);
  const auto [sorted, order] = at::sort(expert, /*stable=*/true, 0, /*descending=*/false);
  const at::Tensor begins = at::searchsorted(sorted, at::arange(num_experts + 1, local.options()));
  const at::Tensor row_of =
      at::empty_like(order).scatter_(0, order, at::arange(order.numel(), local.options()));
  ExpertOrder result;
  result.counts = begins.diff().to(at::kInt);
  result.choices = order;
  result.rows = at::where(chosen, row_of, -1).view(choices.sizes());
  return result;
}

void add_rows(const at::Tensor& rows, const at::Tensor& places, at::Tensor sums) {
  const at::NoGradGuard no_grad;
  check_shape("rows of experts", rows, {-1, -1});
  check_shape("places of choices", places, {sums.size(0), -1});
  check_shape("sums of rows", sums, {-1, rows.size(1)});
  if (rows.size(0) == 0) return;
  for (int64_t j = 0; j < places.size(1); ++j) {
    const at::Tensor place = places.select(1, j);
    const at::Tensor row = rows.index_select(0, place.clamp_min(0)).to(sums.scalar_type());
    sums.add_(at::where(place.ge(0).unsqueeze(1), row, 0.0));
  }
}

at::Tensor values_of_choices(const at::Tensor& values, const at::Tensor& places) {
  const at::NoGradGuard no_grad;
  check_shape("values of rows", values, {-1});
  if (values.numel() == 0) return at::zeros(places.sizes(), values.options());
  const at::Tensor taken = values.index_select(0, places.reshape({-1}).clamp_min(0));
  return at::where(places.ge(0), taken.view(places.sizes()), 0.0);
}

at::Tensor experts_of_rows(const at::Tensor& counts, int64_t n) {
  const at::NoGradGuard no_grad;
  const at::Tensor row = at::arange(n, counts.options().dtype(at::kLong));
  return at::searchsorted(counts.cumsum(0), row, /*out_int32=*/false, /*right=*/true)
      .clamp_max(counts.numel() - 1);
}

void sum_rows_of_experts(const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& scales,
                         at::Tensor target, double beta) {
  const at::NoGradGuard no_grad;
  const int64_t n = rows.size(0);
  check_shape("sums over the rows of experts", target, {counts.numel(), rows.size(1)});
  const at::ScalarType type = accumulate_type(rows);
  const at::Tensor row = at::arange(n, counts.options().dtype(at::kLong)).unsqueeze(1);
  const at::Tensor ends = counts.cumsum(0), begins = ends - counts;
  // [E, n]: the scale of each row at its expert. Rows after the last one's may hold anything.
  const at::Tensor of_expert = row.ge(begins).logical_and(row.lt(ends)).t();
  const at::Tensor valid = row.lt(ends.narrow(0, counts.numel() - 1, 1));
  at::Tensor factors = of_expert.to(type);
  if (scales.defined()) factors = at::where(of_expert, scales.to(type).unsqueeze(0), 0.0);
  target.addmm_(factors, at::where(valid, rows.to(type), 0.0), beta, 1.0);
}

}  // namespace megatron
