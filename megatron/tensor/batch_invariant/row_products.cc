#include "megatron/tensor/batch_invariant/row_products.h"

#include <algorithm>
#include <array>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/kernels/few_rows_product.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/kernels/products/gated_product.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// What one step decodes. For one row BLAS does not pack the weights, and uses one thread.
constexpr int64_t kMostFewRows = 16;
// Smaller weights stay in the cache, where packing is cheap.
constexpr int64_t kFewRowsWeights = int64_t{1} << 19;
// Of rows that stay in the cache while all weights pass by.
constexpr int64_t kCachedBytes = int64_t{1} << 18;

bool knows_types(const at::Tensor& x, const at::Tensor& w) {
  return x.is_cpu() && x.scalar_type() == w.scalar_type() &&
         (w.scalar_type() == at::kFloat || w.scalar_type() == at::kDouble);
}

void check_types(const at::Tensor& x, const at::Tensor& w) {
  MEGATRON_CHECK(knows_types(x, w),
                 "batch-invariant products are built for fp32 and fp64 on a CPU, not for ",
                 toString(x.scalar_type()), x.is_cpu() ? " on a CPU" : " on a GPU");
}

at::IntArrayRef dimensions_before(const at::Tensor& matrices) {
  return matrices.sizes().slice(0, static_cast<size_t>(matrices.dim()) - 2);
}

// Contiguous matrices, by their number among those of a batch that theirs is expanded to.
class Matrices {
 public:
  Matrices(const at::Tensor& x, at::IntArrayRef batch)
      : x_(x.contiguous()), bytes_(x.size(-2) * x.size(-1) * x.element_size()) {
    const at::IntArrayRef own = dimensions_before(x);
    own_ = at::arange(c10::multiply_integers(own)).view(own).expand(batch).contiguous();
  }
  const void* at(int64_t i) const {
    return static_cast<const char*>(x_.const_data_ptr()) +
           own_.const_data_ptr<int64_t>()[i] * bytes_;
  }

 private:
  at::Tensor x_, own_;
  int64_t bytes_;
};

#ifdef MEGATRON_CUDA
// `args` has the weights, which `w` [n, k] has the shape of.
bool launch_few_rows(const at::Tensor& x, const at::Tensor& w,
                     const std::array<const at::Tensor*, 4>& bias_addend_out_gain,
                     const AroundProduct& around, FewRowsProduct& args) {
  if (!x.is_cuda() || x.size(0) > kMostRowsOnGpu || w.numel() < kFewRowsWeights ||
      !x.is_contiguous())
    return false;
  const auto& [bias, addend, out, gain] = bias_addend_out_gain;
  for (const at::Tensor* t : bias_addend_out_gain)
    if (t->defined() && (!t->is_contiguous() || t->scalar_type() != x.scalar_type())) return false;
  args.dtype = to_dtype(x.scalar_type());
  args.rows = x.size(0);
  args.columns = out->size(1);
  args.inner = w.size(1);
  args.x = x.const_data_ptr();
  if (gain->defined()) args.gain = gain->const_data_ptr();
  args.eps = around.eps;
  args.zero_centered = around.zero_centered;
  args.swiglu = around.swiglu;
  if (bias->defined()) args.bias = bias->const_data_ptr();
  if (addend->defined()) args.addend = addend->const_data_ptr();
  args.out = out->data_ptr();
  if (!has_few_rows_product(args)) return false;
  few_rows_product_cuda(args, current_stream(x));
  return true;
}

// Sizes alone.
GatedProduct gated_product(const at::Tensor& x, const at::Tensor& w) {
  GatedProduct out;
  out.inner = w.size(1);
  out.rows = x.numel() / out.inner;
  out.columns = w.size(0) / 2;
  return out;
}
#endif

}  // namespace

bool is_few_rows(const at::Tensor& x, const at::Tensor& w) {
  return knows_types(x, w) && x.size(0) >= 1 && x.size(0) <= kMostFewRows &&
         w.numel() >= kFewRowsWeights && w.is_contiguous();
}

#ifdef MEGATRON_CUDA

bool multiply_few_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                       const at::Tensor& addend, const at::Tensor& out, bool at_rest,
                       const AroundProduct& around) {
  if (w.scalar_type() != x.scalar_type() || !w.is_contiguous()) return false;
  FewRowsProduct args;
  args.w = w.const_data_ptr();
  args.weights_at_rest = at_rest;
  return launch_few_rows(x, w, {&bias, &addend, &out, &around.gain}, around, args);
}

bool multiply_few_rows(const at::Tensor& x, const QuantizedMatrix& w, const at::Tensor& bias,
                       const at::Tensor& addend, const at::Tensor& out, bool at_rest,
                       const AroundProduct& around) {
  if (w.codes.scalar_type() != at::kFloat8_e4m3fn || w.layout == ScaleLayout::kVector128)
    return false;
  FewRowsProduct args;
  args.w = w.codes.const_data_ptr();
  args.w_scale = w.scale.const_data_ptr<float>();
  if (w.layout == ScaleLayout::kTensor)
    args.w_scale += kFp8InverseAt;
  else
    args.w_scale_stride = w.scale.size(1);
  args.weights_at_rest = at_rest;
  return launch_few_rows(x, w.codes, {&bias, &addend, &out, &around.gain}, around, args);
}

bool is_gated_rows(const at::Tensor& x, const at::Tensor& w) {
  constexpr uintptr_t kAlignment = 16;
  return !is_batch_invariant() && w.is_cuda() && w.is_contiguous() &&
         w.scalar_type() == at::kBFloat16 &&
         reinterpret_cast<uintptr_t>(w.const_data_ptr()) % kAlignment == 0 &&
         has_gated_product(gated_product(x, w));
}

at::Tensor multiply_gated_rows(const at::Tensor& x, const at::Tensor& w) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0) / 2;
  const at::Tensor rows = x.to(w.scalar_type()).contiguous();
  at::Tensor y = at::empty(shape, rows.options());
  GatedProduct args = gated_product(rows, w);
  args.x = rows.const_data_ptr();
  args.w = w.const_data_ptr();
  args.out = y.data_ptr();
  args.weights_at_rest = true;
  gated_product_cuda(args, current_stream(rows));
  return y;
}

#else

bool multiply_few_rows(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&, bool, const AroundProduct&) {
  return false;
}
bool multiply_few_rows(const at::Tensor&, const QuantizedMatrix&, const at::Tensor&,
                       const at::Tensor&, const at::Tensor&, bool, const AroundProduct&) {
  return false;
}
bool is_gated_rows(const at::Tensor&, const at::Tensor&) { return false; }
at::Tensor multiply_gated_rows(const at::Tensor&, const at::Tensor&) {
  MEGATRON_ASSERT(false, "a product with SwiGLU in a build without CUDA");
}

#endif

void multiply_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& out) {
  check_types(x, w);
  const at::Tensor rows = x.contiguous(), weights = w.contiguous();
  FewRowsProduct args;
  args.dtype = to_dtype(w.scalar_type());
  args.columns = w.size(0);
  args.inner = w.size(1);
  args.w = weights.const_data_ptr();
  const int64_t of_row = std::max<int64_t>(1, args.inner * rows.element_size());
  const int64_t step = std::max(kMostFewRows, kCachedBytes / of_row);
  for (int64_t begin = 0; begin < rows.size(0); begin += step) {
    const at::Tensor in_cache = rows.narrow(0, begin, std::min(step, rows.size(0) - begin));
    args.rows = in_cache.size(0);
    args.x = in_cache.const_data_ptr();
    args.out = out.narrow(0, begin, args.rows).data_ptr();
    parallel_rows(args.columns, args.rows * args.inner,
                  [&](int64_t from, int64_t to) { few_rows_product_cpu(args, from, to); });
  }
}

at::Tensor multiply_matrices(const at::Tensor& a, const at::Tensor& b) {
  if (!is_batch_invariant()) return at::matmul(a, b);
  check_types(a, b);
  std::vector<int64_t> shape = at::infer_size(dimensions_before(a), dimensions_before(b));
  const Matrices left(a, shape), right(b.mT(), shape);
  const int64_t count = c10::multiply_integers(shape), m = a.size(-2), n = b.size(-1),
                inner = a.size(-1);
  shape.insert(shape.end(), {m, n});
  const at::Tensor out = at::empty(shape, a.options());
  parallel_rows(count, m * n * inner, [&](int64_t begin, int64_t end) {
    FewRowsProduct args;
    args.dtype = to_dtype(a.scalar_type());
    args.rows = m;
    args.columns = n;
    args.inner = inner;
    for (int64_t i = begin; i < end; ++i) {
      args.x = left.at(i);
      args.w = right.at(i);
      args.out = static_cast<char*>(out.data_ptr()) + i * m * n * out.element_size();
      few_rows_product_cpu(args, 0, n);
    }
  });
  return out;
}

at::Tensor solve_unit_lower(const at::Tensor& a, const at::Tensor& x) {
  if (!is_batch_invariant())
    return at::linalg_solve_triangular(a, x, /*upper=*/false, /*left=*/true,
                                       /*unitriangular=*/true);
  const at::Tensor below = a.tril(-1), solved = at::zeros_like(x.mT().contiguous()).mT();
  for (int64_t i = 0; i < x.size(-2); ++i)
    solved.narrow(-2, i, 1).copy_(x.narrow(-2, i, 1) -
                                  multiply_matrices(below.narrow(-2, i, 1), solved));
  return solved;
}

}  // namespace megatron
