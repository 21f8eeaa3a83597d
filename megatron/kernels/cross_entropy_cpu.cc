#include <algorithm>
#include <limits>

#include "megatron/kernels/cross_entropy.h"
#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/lanes.h"
#include "megatron/kernels/detail/math.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 1024;

template <class Acc>
Acc max_of_run(const Acc* x, int64_t n, Acc start) {
  Acc lanes[16];
  std::fill_n(lanes, 16, start);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  }
  for (int j = 0; i < n; ++i, ++j) lanes[j] = x[i] > lanes[j] ? x[i] : lanes[j];
  return *std::max_element(lanes, lanes + 16);
}

template <class Acc>
void sums_rows(const CrossEntropy& ce, const CrossEntropySums& sums, int64_t begin, int64_t end) {
  Acc run[kRun];
  for (int64_t t = begin; t < end; ++t) {
    Acc best = -std::numeric_limits<Acc>::infinity();
    for (int64_t i = 0; i < ce.valid; i += kRun) {
      const int64_t n = std::min(kRun, ce.valid - i);
      best = max_of_run(load_run(ce.dtype, ce.logits, t * ce.stride + i, n, run), n, best);
    }
    Acc total = 0;
    for (int64_t i = 0; i < ce.valid; i += kRun) {
      const int64_t n = std::min(kRun, ce.valid - i);
      const Acc* x = load_run(ce.dtype, ce.logits, t * ce.stride + i, n, run);
      total += sum_over<Acc>(n, [=](int64_t j) { return fast_exp(x[j] - best); });
    }
    const int64_t id = ce.targets[t];
    static_cast<Acc*>(sums.max)[t] = best;
    static_cast<Acc*>(sums.sum)[t] = total;
    static_cast<Acc*>(sums.target)[t] =
        id >= 0 && id < ce.valid ? *load_run(ce.dtype, ce.logits, t * ce.stride + id, 1, run)
                                 : Acc(0);
  }
}

template <class Acc>
void backward_rows(const CrossEntropy& ce, const CrossEntropyBackward& args, int64_t begin,
                   int64_t end) {
  Acc in_run[kRun], out_run[kRun];
  for (int64_t t = begin; t < end; ++t) {
    const Acc lse = static_cast<const Acc*>(args.lse)[t];
    const Acc scale = static_cast<const Acc*>(args.scale)[t];
    const Acc factor = scale * (Acc(1) + Acc(2) * static_cast<Acc>(args.z_coeff) * lse);
    const int64_t id = ce.targets[t];
    for (int64_t i = 0; i < ce.columns; i += kRun) {
      const int64_t n = std::min(kRun, ce.columns - i);
      const int64_t counted = std::clamp<int64_t>(ce.valid - i, 0, n);
      const Acc* x = load_run(ce.dtype, ce.logits, t * ce.stride + i, n, in_run);
      Acc* out = output_run(ce.dtype, args.dlogits, t * args.stride + i, out_run);
      for (int64_t j = 0; j < counted; ++j) out[j] = fast_exp(x[j] - lse) * factor;
      for (int64_t j = counted; j < n; ++j) out[j] = 0;
      if (id >= i && id < i + counted) out[id - i] -= scale;
      store_run(ce.dtype, args.dlogits, t * args.stride + i, n, out);
    }
  }
}

}  // namespace

void cross_entropy_sums_cpu(const CrossEntropy& ce, const CrossEntropySums& sums, int64_t begin,
                            int64_t end) {
  with_accumulator(ce.dtype, [&](auto acc) { sums_rows<decltype(acc)>(ce, sums, begin, end); });
}

void cross_entropy_backward_cpu(const CrossEntropy& ce, const CrossEntropyBackward& args,
                                int64_t begin, int64_t end) {
  with_accumulator(ce.dtype, [&](auto acc) { backward_rows<decltype(acc)>(ce, args, begin, end); });
}

}  // namespace megatron
