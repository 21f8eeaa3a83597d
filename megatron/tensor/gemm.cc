#include "megatron/tensor/gemm.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/few_rows_product.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/detail/partial_sum.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// [..., n] as [rows, n].
at::Tensor as_matrix(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// Note [Rows of odd length]
// Where rows of 16-bit elements are no multiples of 16 bytes, cuBLAS has kernels of an older
// generation alone, two to three times as slow. So large products are those of copies whose rows
// end with zeros, which add nothing to any sum.
constexpr int64_t kRowElements = 8, kLeastRowsToCopy = 512;

bool has_odd_rows(const at::Tensor& weight, int64_t rows) {
  return weight.is_cuda() && weight.element_size() == 2 && weight.size(1) % kRowElements != 0 &&
         rows >= kLeastRowsToCopy && !is_batch_invariant();
}

int64_t even_length(const at::Tensor& matrix) {
  return (matrix.size(1) + kRowElements - 1) / kRowElements * kRowElements;
}

at::Tensor with_even_rows(const at::Tensor& matrix) {
  const int64_t columns = matrix.size(1), all = even_length(matrix);
  at::Tensor out = at::empty({matrix.size(0), all}, matrix.options());
  out.narrow(1, 0, columns).copy_(matrix);
  out.narrow(1, columns, all - columns).zero_();
  return out;
}

}  // namespace

int64_t rows_of_choice(int64_t rows) {
  int64_t octave = 1;
  while (2 * octave < rows) octave *= 2;  // octave < rows <= 2 octave
  const int64_t distance = octave < 8 ? octave : std::max<int64_t>(8, octave / 4);
  return (std::max<int64_t>(1, rows) + distance - 1) / distance * distance;
}

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                          const at::Tensor& addend, bool at_rest) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  at::Tensor y = at::empty(shape, x.options().requires_grad(false));
  linear_forward_into(x, w, bias, y, addend, at_rest);
  return y;
}

void linear_forward_into(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                         at::Tensor y, const at::Tensor& addend, bool at_rest) {
  const at::NoGradGuard no_grad;
  check_shape("linear weight", w, {-1, x.size(-1)});
  MEGATRON_ASSERT(!addend.defined() || addend.sizes() == y.sizes(), "a product of ", y.sizes(),
                  " is added to ", addend.sizes());
  use_wide_blas_reductions();
  const at::Tensor rows = as_matrix(x), shift = bias.defined() ? bias.to(w.scalar_type()) : bias;
  if (bias.defined()) check_shape("linear bias", bias, {w.size(0)});
  at::Tensor out = y.view({rows.size(0), w.size(0)});
  const at::Tensor summand = addend.defined() ? addend.reshape(out.sizes()) : addend;
  const bool invariant = is_batch_invariant();
  if (!invariant && multiply_few_rows(rows, w, shift, summand, out, at_rest)) return;
  if (has_odd_rows(w, rows.size(0)) &&
      blas_forward(with_even_rows(rows), with_even_rows(w), shift, summand, out))
    return;
  if (x.is_cuda() && blas_forward(rows, w, shift, summand, out)) return;
  if (invariant || is_few_rows(rows, w)) {
    multiply_rows(rows, w, out);
    if (bias.defined()) out.add_(shift);
  } else {
    bias.defined() ? at::addmm_out(out, shift, rows, w.t()) : at::mm_out(out, rows, w.t());
  }
  if (addend.defined()) out.add_(summand);
}

at::Tensor fused_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                const AroundProduct& around) {
  const at::NoGradGuard no_grad;
  check_shape("linear weight", w, {-1, x.size(-1)});
  if (!x.is_cuda() || is_batch_invariant() || x.numel() > kMostRowsOnGpu * x.size(-1)) return {};
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = around.swiglu ? w.size(0) / 2 : w.size(0);
  at::Tensor y = at::empty(shape, x.options().requires_grad(false));
  const at::Tensor shift = bias.defined() ? bias.to(w.scalar_type()) : bias;
  const bool done = multiply_few_rows(as_matrix(x), w, shift, {}, y.view({-1, shape.back()}),
                                      /*at_rest=*/true, around);
  return done ? y : at::Tensor();
}

at::Tensor linear_input_grad(const at::Tensor& dy, const at::Tensor& w,
                             const at::Tensor& gelu_input) {
  std::vector<int64_t> shape = dy.sizes().vec();
  shape.back() = w.size(1);
  at::Tensor dx = at::empty(shape, dy.options().requires_grad(false));
  linear_input_grad_into(dy, w, dx, gelu_input);
  return dx;
}

void linear_input_grad_into(const at::Tensor& dy, const at::Tensor& w, at::Tensor dx,
                            const at::Tensor& gelu_input) {
  const at::NoGradGuard no_grad;
  check_shape("linear weight", w, {dy.size(-1), -1});
  MEGATRON_ASSERT(!gelu_input.defined() || gelu_input.sizes() == dx.sizes(), "a gradient of ",
                  dx.sizes(), " for the GELU of ", gelu_input.sizes());
  use_wide_blas_reductions();
  const at::Tensor rows = as_matrix(dy);
  at::Tensor out = dx.view({rows.size(0), w.size(1)});
  const at::Tensor before = gelu_input.defined() ? gelu_input.reshape(out.sizes()) : gelu_input;
  if (has_odd_rows(w, rows.size(0)) && !before.defined()) {
    at::Tensor even = at::empty({rows.size(0), even_length(w)}, rows.options());
    if (blas_input_grad(rows, with_even_rows(w), before, even)) {
      out.copy_(even.narrow(1, 0, w.size(1)));
      return;
    }
  }
  if (dy.is_cuda() && blas_input_grad(rows, w, before, out)) return;
  at::mm_out(out, rows, w);
  if (before.defined())
    activation_backward_into(out, before.contiguous(), Activation::kGeluTanh, 0.0, out);
}

void linear_weight_grad(const at::Tensor& dy, const at::Tensor& x, at::Tensor target, double beta) {
  const at::NoGradGuard no_grad;
  check_shape("weight gradient", target, {dy.size(-1), x.size(-1)});
  MEGATRON_ASSERT(dy.scalar_type() == x.scalar_type(), "weight gradient of ",
                  c10::toString(dy.scalar_type()), " and ", c10::toString(x.scalar_type()));
  at::Tensor grad = as_matrix(dy), rows = as_matrix(x);
  MEGATRON_ASSERT(grad.size(0) == rows.size(0), "weight gradient of ", grad.size(0), " and ",
                  rows.size(0), " rows");
  if (target.scalar_type() != grad.scalar_type()) {
    if (has_odd_rows(rows, rows.size(0))) {
      at::Tensor even = at::empty({target.size(0), even_length(rows)}, target.options());
      if (blas_wide_weight_grad(grad, with_even_rows(rows), even, 0.0)) {
        const at::Tensor found = even.narrow(1, 0, rows.size(1));
        beta == 0.0 ? target.copy_(found) : target.mul_(beta).add_(found);
        return;
      }
    }
    if (grad.is_cuda() && blas_wide_weight_grad(grad, rows, target, beta)) return;
    grad = grad.to(target.scalar_type());  // products of bf16 and fp16 are exact in fp32
    rows = rows.to(target.scalar_type());
  }
  target.addmm_(grad.t(), rows, beta, 1.0);
}

void bias_grad(const at::Tensor& dy, at::Tensor target, double beta) {
  const at::NoGradGuard no_grad;
  check_shape("bias gradient", target, {dy.size(-1)});
  const at::Tensor rows = as_matrix(dy).contiguous();
  ColumnSum args;
  args.dtype = to_dtype(rows.scalar_type());
  args.rows = rows.size(0);
  args.columns = rows.size(1);
  args.x = rows.const_data_ptr();
  const int64_t blocks = (args.rows + kColumnSumRows - 1) / kColumnSumRows;
  at::Tensor partial =
      at::empty({blocks, args.columns}, rows.options().dtype(accumulate_type(rows)));
  args.partial = partial.data_ptr();
  launch(
      rows, blocks, args.columns * kColumnSumRows,
      [&](int64_t begin, int64_t end) { column_sum_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(column_sum_cuda(args, stream)); });
  add_partial_sums(partial, beta, target);
}

void add_partial_sums(const at::Tensor& partial, double beta, at::Tensor target) {
  MEGATRON_ASSERT(target.is_contiguous(), "a gradient target must be contiguous");
  PartialSum args;
  args.dtype = to_dtype(partial.scalar_type());
  args.target_dtype = to_dtype(target.scalar_type());
  MEGATRON_ASSERT(args.target_dtype != DType::kFloat64 || args.dtype == DType::kFloat64,
                  "an fp64 gradient target needs fp64 sums");
  args.blocks = partial.size(0);
  args.columns = partial.size(1);
  args.partial = partial.const_data_ptr();
  args.beta = beta;
  args.target = target.data_ptr();
  launch(
      partial, args.columns, std::max<int64_t>(1, args.blocks),
      [&](int64_t begin, int64_t end) { partial_sum_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(partial_sum_cuda(args, stream)); });
}

}  // namespace megatron
