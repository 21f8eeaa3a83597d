#include "megatron/tensor/batch_invariant/row_products.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/few_rows_product.h"
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

}  // namespace

bool is_few_rows(const at::Tensor& x, const at::Tensor& w) {
  return knows_types(x, w) && x.size(0) >= 1 && x.size(0) <= kMostFewRows &&
         w.numel() >= kFewRowsWeights && w.is_contiguous();
}

void multiply_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& out) {
  MEGATRON_CHECK(knows_types(x, w),
                 "batch-invariant products are built for fp32 and fp64 on a CPU, not for ",
                 toString(x.scalar_type()), x.is_cpu() ? " on a CPU" : " on a GPU");
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

}  // namespace megatron
