#include <algorithm>
#include <vector>

#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/detail/block_io.h"

namespace megatron {
namespace {

template <class Acc>
void sum_blocks(const ColumnSum& sum, int64_t begin, int64_t end) {
  const int64_t n = sum.columns;
  std::vector<Acc> scratch(n);
  for (int64_t block = begin; block < end; ++block) {
    Acc* partial = static_cast<Acc*>(sum.partial) + block * n;
    std::fill_n(partial, n, Acc(0));
    const int64_t last = std::min(sum.rows, (block + 1) * kColumnSumRows);
    for (int64_t row = block * kColumnSumRows; row < last; ++row) {
      const Acc* x = load_run(sum.dtype, sum.x, row * n, n, scratch.data());
      for (int64_t i = 0; i < n; ++i) partial[i] += x[i];
    }
  }
}

template <class Acc>
void add_partials(const PartialSum& sum, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 256;
  Acc total[kRun], old_run[kRun];
  for (int64_t column = begin; column < end; column += kRun) {
    const int64_t n = std::min(kRun, end - column);
    std::fill_n(total, n, Acc(0));
    for (int64_t block = 0; block < sum.blocks; ++block) {
      const Acc* partial = static_cast<const Acc*>(sum.partial) + block * sum.columns + column;
      for (int64_t i = 0; i < n; ++i) total[i] += partial[i];
    }
    if (sum.beta != 0) {
      const Acc* old = load_run(sum.target_dtype, sum.target, column, n, old_run);
      const Acc beta = static_cast<Acc>(sum.beta);
      for (int64_t i = 0; i < n; ++i) total[i] += beta * old[i];
    }
    store_run(sum.target_dtype, sum.target, column, n, total);
  }
}

}  // namespace

void column_sum_cpu(const ColumnSum& sum, int64_t block_begin, int64_t block_end) {
  with_accumulator(sum.dtype,
                   [&](auto acc) { sum_blocks<decltype(acc)>(sum, block_begin, block_end); });
}

void partial_sum_cpu(const PartialSum& sum, int64_t column_begin, int64_t column_end) {
  // An fp64 target needs an fp64 sum; the caller then gives the partial sums the same type.
  with_accumulator(sum.dtype,
                   [&](auto acc) { add_partials<decltype(acc)>(sum, column_begin, column_end); });
}

}  // namespace megatron
