#include <algorithm>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/sum_parts.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 256;

template <class Acc>
void sum_run(const SumParts& sum, int64_t begin, int64_t n) {
  Acc total[kRun], scratch[kRun];
  std::copy_n(load_run(sum.dtype, sum.parts[0], begin, n, scratch), n, total);
  for (int part = 1; part < sum.num_parts; ++part) {
    const Acc* x = load_run(sum.dtype, sum.parts[part], begin, n, scratch);
    for (int64_t i = 0; i < n; ++i) total[i] += x[i];
  }
  if (sum.target_dtype != sum.dtype) {
    alignas(16) unsigned char rounded[kRun * sizeof(Acc)];
    store_run(sum.dtype, rounded, 0, n, total);
    std::copy_n(load_run(sum.dtype, rounded, 0, n, scratch), n, total);
  }
  if (sum.accumulate) {
    const Acc* old = load_run(sum.target_dtype, sum.target, begin, n, scratch);
    for (int64_t i = 0; i < n; ++i) total[i] = old[i] + total[i];
  }
  store_run(sum.target_dtype, sum.target, begin, n, total);
}

}  // namespace

void sum_parts_cpu(const SumParts& sum, int64_t begin, int64_t end) {
  with_accumulator(sum.dtype, [&](auto acc) {
    for (int64_t i = begin; i < end; i += kRun)
      sum_run<decltype(acc)>(sum, i, std::min(kRun, end - i));
  });
}

}  // namespace megatron
