// The one source that is compiled with OpenMP: at::parallel_for is a template that runs on the
// calling thread alone elsewhere.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "megatron/tensor/detail/launch.h"

#ifndef INTRA_OP_PARALLEL
#error "compile this source with -fopenmp"
#endif

namespace megatron {

namespace {

// What a thread has been given and not begun. Threads that are done take over from others, whose
// processor may be slower or do other work, too.
class Share {
 public:
  Share() = default;
  void give(int64_t begin, int64_t end) {
    next_ = begin;
    end_ = end;
  }
  // Calls body for parts until none is left.
  void run(int64_t part, const std::function<void(int64_t begin, int64_t end)>& body) {
    for (int64_t begin = 0; (begin = next_.fetch_add(part, std::memory_order_relaxed)) < end_;)
      body(begin, std::min(begin + part, end_));
  }

 private:
  alignas(64) std::atomic<int64_t> next_ = 0;
  int64_t end_ = 0;
};

}  // namespace

void parallel_tasks(int64_t count, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body) {
  constexpr int64_t kPartsOfThread = 4;
  const int64_t most = (count + grain - 1) / grain,
                threads = std::min<int64_t>(most, at::get_num_threads());
  if (threads <= 1 || at::in_parallel_region()) {
    if (count > 0) body(0, count);
    return;
  }
  const int64_t share = (count + threads - 1) / threads,
                part = std::max(grain, (share + kPartsOfThread - 1) / kPartsOfThread);
  std::vector<Share> shares(static_cast<size_t>(threads));
  for (int64_t i = 0; i < threads; ++i)
    shares[static_cast<size_t>(i)].give(i * share, std::min(count, (i + 1) * share));
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t own = begin; own < end; ++own)
      for (int64_t i = 0; i < threads; ++i)
        shares[static_cast<size_t>((own + i) % threads)].run(part, body);
  });
}

void parallel_rows(int64_t rows, int64_t row_elements,
                   const std::function<void(int64_t begin, int64_t end)>& body) {
  constexpr int64_t kTaskElements = int64_t{1} << 19;  // below it, waiting for threads costs more
  parallel_tasks(rows, std::max<int64_t>(1, kTaskElements / row_elements), body);
}

}  // namespace megatron
