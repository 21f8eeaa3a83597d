#include "megatron/tensor/experts/expert_rows.h"

#include "megatron/base/check.h"
#include "megatron/kernels/experts/expert_rows.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

void launch_sum(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& base,
                at::Tensor sums) {
  const at::Tensor in = rows.contiguous(), index = places.contiguous();
  SumOfRows args;
  args.dtype = to_dtype(in.scalar_type());
  args.sum_dtype = to_dtype(sums.scalar_type());
  args.tokens = sums.size(0);
  args.choices = index.size(1);
  args.columns = sums.size(1);
  args.rows = in.const_data_ptr();
  args.places = index.const_data_ptr<int64_t>();
  if (base.defined()) args.base = base.const_data_ptr();
  args.sums = sums.data_ptr();
  launch(
      in, args.tokens, args.choices * args.columns,
      [&](int64_t begin, int64_t end) { sum_of_rows_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(sum_of_rows_cuda(args, stream)); });
}

}  // namespace

ExpertOrder order_by_expert(const at::Tensor& choices, int64_t first_expert, int64_t num_experts) {
  const at::NoGradGuard no_grad;
  check_shape("choices of experts", choices, {-1, -1});
  const at::Tensor experts = as_contiguous(choices, at::kInt);
  const auto wide = experts.options().dtype(at::kLong);
  ExpertOrder result{at::empty({num_experts}, experts.options()),
                     at::empty({experts.numel()}, wide), at::empty(experts.sizes(), wide)};
  ExpertOrderArgs args;
  args.choices = experts.numel();
  args.first_expert = first_expert;
  args.num_experts = num_experts;
  args.experts = experts.const_data_ptr<int32_t>();
  args.counts = result.counts.data_ptr<int32_t>();
  args.order = result.choices.data_ptr<int64_t>();
  args.rows = result.rows.data_ptr<int64_t>();
  at::Tensor workspace;
  if (experts.is_cuda()) {
    workspace = at::empty({expert_order_workspace(args.choices, num_experts)},
                          experts.options().dtype(at::kByte));
    args.workspace = workspace.data_ptr();
  }
  launch(
      experts, 1, args.choices, [&](int64_t, int64_t) { expert_order_cpu(args); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(expert_order_cuda(args, stream)); });
  return result;
}

at::Tensor parts_of_choices(const at::Tensor& choices, int64_t num_parts, int64_t experts_of_part) {
  const at::NoGradGuard no_grad;
  check_shape("choices of experts", choices, {-1, -1});
  const at::Tensor experts = as_contiguous(choices, at::kInt);
  at::Tensor parts = at::empty({experts.size(0), num_parts}, experts.options());
  PartsOfChoices args;
  args.tokens = experts.size(0);
  args.choices = experts.size(1);
  args.num_parts = num_parts;
  args.experts_of_part = experts_of_part;
  args.experts = experts.const_data_ptr<int32_t>();
  args.parts = parts.data_ptr<int32_t>();
  launch(
      experts, args.tokens, args.choices,
      [&](int64_t begin, int64_t end) { parts_of_choices_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(parts_of_choices_cuda(args, stream)); });
  return parts;
}

at::Tensor rows_in_parts(const at::Tensor& order, const at::Tensor& choices,
                         const at::Tensor& token_rows, const at::Tensor& shift,
                         int64_t experts_of_part) {
  const at::NoGradGuard no_grad;
  check_shape("rows in parts", token_rows, {choices.size(0), shift.size(0)});
  const at::Tensor experts = as_contiguous(choices, at::kInt),
                   which = as_contiguous(order, at::kLong),
                   rows = as_contiguous(token_rows, at::kLong),
                   moved = as_contiguous(shift, at::kLong);
  at::Tensor result = at::empty_like(which);
  RowsInParts args;
  args.rows = which.numel();
  args.choices = experts.size(1);
  args.num_parts = moved.size(0);
  args.experts_of_part = experts_of_part;
  args.order = which.const_data_ptr<int64_t>();
  args.experts = experts.const_data_ptr<int32_t>();
  args.token_rows = rows.const_data_ptr<int64_t>();
  args.shift = moved.const_data_ptr<int64_t>();
  args.to = result.data_ptr<int64_t>();
  launch(
      experts, args.rows, 1,
      [&](int64_t begin, int64_t end) { rows_in_parts_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(rows_in_parts_cuda(args, stream)); });
  return result;
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index, int64_t divisor) {
  const at::NoGradGuard no_grad;
  const at::Tensor from = x.contiguous(), which = as_contiguous(index, at::kLong);
  std::vector<int64_t> shape = index.sizes().vec();
  shape.insert(shape.end(), x.sizes().begin() + 1, x.sizes().end());
  at::Tensor y = at::empty(shape, x.options());
  GatherRows args;
  args.rows = which.numel();
  args.row_bytes = (args.rows == 0 ? 0 : y.numel() / args.rows) * x.element_size();
  args.from = from.const_data_ptr();
  args.index = which.const_data_ptr<int64_t>();
  args.divisor = divisor;
  args.to = y.data_ptr();
  launch(
      from, args.rows, args.row_bytes / x.element_size(),
      [&](int64_t begin, int64_t end) { gather_rows_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(gather_rows_cuda(args, stream)); });
  return y;
}

at::Tensor spread_rows(const at::Tensor& x, const at::Tensor& places) {
  const at::NoGradGuard no_grad;
  check_shape("places of choices", places, {x.size(0), -1});
  const at::Tensor from = x.contiguous(), which = as_contiguous(places, at::kLong);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = which.numel();
  at::Tensor y = at::empty(shape, x.options());
  SpreadRows args;
  args.tokens = x.size(0);
  args.choices = which.size(1);
  args.row_bytes = (args.tokens == 0 ? 0 : x.numel() / args.tokens) * x.element_size();
  args.from = from.const_data_ptr();
  args.places = which.const_data_ptr<int64_t>();
  args.to = y.data_ptr();
  launch(
      from, args.tokens, args.choices * args.row_bytes / x.element_size(),
      [&](int64_t begin, int64_t end) { spread_rows_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(spread_rows_cuda(args, stream)); });
  return y;
}

at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& base) {
  const at::NoGradGuard no_grad;
  check_shape("rows of experts", rows, {-1, -1});
  check_shape("places of choices", places, {-1, -1});
  at::Tensor sums = at::empty({places.size(0), rows.size(1)}, rows.options());
  if (base.defined()) check_shape("the base of sums of rows", base, {sums.size(0), sums.size(1)});
  launch_sum(rows, places, base.defined() ? as_contiguous(base, rows.scalar_type()) : base, sums);
  return sums;
}

void add_rows(const at::Tensor& rows, const at::Tensor& places, at::Tensor sums) {
  const at::NoGradGuard no_grad;
  check_shape("rows of experts", rows, {-1, -1});
  check_shape("places of choices", places, {sums.size(0), -1});
  check_shape("sums of rows", sums, {-1, rows.size(1)});
  MEGATRON_ASSERT(sums.scalar_type() == accumulate_type(rows), "sums of rows in ",
                  c10::toString(sums.scalar_type()));
  launch_sum(rows, places, /*base=*/sums, sums);
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
