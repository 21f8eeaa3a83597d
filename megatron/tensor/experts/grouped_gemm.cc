#include "megatron/tensor/experts/grouped_gemm.h"

#include <limits>

#include "megatron/base/check.h"
#include "megatron/kernels/experts/grouped_gemm.h"
#include "megatron/tensor/detail/expert_loops.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Rows a [R, ..] by expert, b and d as GroupedProduct says.
void check_operands(const at::Tensor& a, const at::Tensor& b, const at::Tensor& d,
                    const at::Tensor& counts, at::ScalarType d_type) {
  const auto type = [](at::ScalarType t) { return c10::toString(t); };
  MEGATRON_ASSERT(counts.dim() == 1, "counts of experts have shape ", counts.sizes());
  MEGATRON_ASSERT(counts.scalar_type() == at::kInt || counts.scalar_type() == at::kLong,
                  "counts of experts are ", type(counts.scalar_type()), ", expected Int or Long");
  MEGATRON_ASSERT(a.scalar_type() == b.scalar_type() && d.scalar_type() == d_type,
                  "a grouped product of ", type(a.scalar_type()), " and ", type(b.scalar_type()),
                  " into ", type(d.scalar_type()), ", expected two of one type into ",
                  type(d_type));
  for (const at::Tensor* one : {&b, &d, &counts})
    MEGATRON_ASSERT(one->device() == a.device(), "a grouped product of tensors on ",
                    a.device().str(), " and ", one->device().str());
  for (const at::Tensor* one : {&a, &b, &d, &counts})
    MEGATRON_ASSERT(one->is_contiguous(), "a grouped product of a tensor with strides ",
                    one->strides(), ", expected a contiguous one");
}

// Runs the product where the device has a kernel for it, else returns false.
bool run_grouped([[maybe_unused]] GroupedGemm gemm, [[maybe_unused]] const at::Tensor& a,
                 [[maybe_unused]] const at::Tensor& b, [[maybe_unused]] const at::Tensor& d,
                 [[maybe_unused]] const at::Tensor& counts) {
#ifdef MEGATRON_CUDA
  const bool aligned = gemm.n % 8 == 0 && gemm.k % 8 == 0 &&
                       ((reinterpret_cast<uintptr_t>(a.const_data_ptr()) |
                         reinterpret_cast<uintptr_t>(b.const_data_ptr()) |
                         reinterpret_cast<uintptr_t>(d.const_data_ptr())) %
                        16) == 0;
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (!a.is_cuda() || a.scalar_type() != at::kBFloat16 || !aligned || a.numel() == 0 ||
      gemm.rows > kLimit || gemm.n > kLimit || gemm.k > kLimit || !has_grouped_gemm())
    return false;
  gemm.experts = counts.numel();
  gemm.counts = counts.const_data_ptr();
  gemm.wide_counts = counts.scalar_type() == at::kLong;
  gemm.a = a.const_data_ptr();
  gemm.b = b.const_data_ptr();
  gemm.d = d.data_ptr();
  // From the caching allocator: the stream orders its reuse.
  const at::Tensor workspace =
      at::empty({grouped_gemm_workspace(gemm.experts)}, a.options().dtype(at::kByte));
  gemm.workspace = workspace.data_ptr();
  grouped_gemm_cuda(gemm, current_stream(a));
  return true;
#else
  return false;
#endif
}

}  // namespace

void grouped_forward_into(const at::Tensor& x, const at::Tensor& w, const at::Tensor& counts,
                          at::Tensor y, const at::Tensor& before) {
  const at::NoGradGuard no_grad;
  check_shape("input of experts", x, {-1, -1});
  check_shape("weight of experts", w, {counts.numel(), -1, x.size(1)});
  check_shape("output of experts", y, {x.size(0), w.size(1)});
  check_operands(x, w, y, counts, x.scalar_type());
  GroupedGemm gemm;
  gemm.product = GroupedProduct::kForward;
  gemm.rows = x.size(0);
  gemm.n = w.size(1);
  gemm.k = w.size(2);
  if (run_grouped(gemm, x, w, y, counts)) return;
  for_each_expert(counts, x.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    multiply_rows(x.narrow(0, first, rows), y.narrow(0, first, rows), rows_before(before, expert),
                  [&](const at::Tensor& in, const at::Tensor& out) {
                    linear_forward_into(in, w[expert], {}, out);
                  });
  });
}

void grouped_input_grad_into(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& counts,
                             at::Tensor dx, const at::Tensor& before) {
  const at::NoGradGuard no_grad;
  check_shape("output gradient of experts", dy, {-1, -1});
  check_shape("weight of experts", w, {counts.numel(), dy.size(1), -1});
  check_shape("input gradient of experts", dx, {dy.size(0), w.size(2)});
  check_operands(dy, w, dx, counts, dy.scalar_type());
  GroupedGemm gemm;
  gemm.product = GroupedProduct::kInputGrad;
  gemm.rows = dy.size(0);
  gemm.n = w.size(1);
  gemm.k = w.size(2);
  if (run_grouped(gemm, dy, w, dx, counts)) return;
  for_each_expert(counts, dy.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    multiply_rows(dy.narrow(0, first, rows), dx.narrow(0, first, rows), rows_before(before, expert),
                  [&](const at::Tensor& in, const at::Tensor& out) {
                    linear_input_grad_into(in, w[expert], out);
                  });
  });
}

void grouped_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& counts,
                         at::Tensor target, double beta) {
  const at::NoGradGuard no_grad;
  check_shape("output gradient of experts", dy, {-1, -1});
  check_shape("input of experts", x, {dy.size(0), -1});
  check_shape("weight gradient of experts", target, {counts.numel(), dy.size(1), x.size(1)});
  check_operands(dy, x, target, counts, accumulate_type(x));
  MEGATRON_ASSERT(beta == 0.0 || beta == 1.0, "a grouped weight gradient with beta ", beta,
                  ", expected 0 or 1");
  GroupedGemm gemm;
  gemm.product = GroupedProduct::kWeightGrad;
  gemm.rows = dy.size(0);
  gemm.n = dy.size(1);
  gemm.k = x.size(1);
  gemm.beta = static_cast<float>(beta);
  if (run_grouped(gemm, dy, x, target, counts)) return;
  for_each_expert(counts, dy.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    if (rows > 0) {
      linear_weight_grad(dy.narrow(0, first, rows), x.narrow(0, first, rows), target[expert], beta);
    } else if (beta == 0.0) {
      target[expert].zero_();
    }
  });
}

}  // namespace megatron
