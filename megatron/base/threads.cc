#include "megatron/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace megatron {

int available_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  // More than 1024 cores
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int omp_num_threads() {
  const char* const text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);  // in "4,2" the outermost level comes first
  return end != text && number > 0 ? static_cast<int>(std::min(number, 65536L)) : 0;
}

int choose_num_threads(int64_t requested, int local_ranks) {
  if (requested > 0) return static_cast<int>(std::min<int64_t>(requested, 65536));
  if (const int asked = omp_num_threads(); asked > 0) return asked;
  return std::max(1, available_cores() / std::max(1, local_ranks));
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body,
                  int threads) {
  if (count <= 0) return;
  grain = std::clamp<int64_t>(grain, 1, count);
  const int64_t ranges = (count - 1) / grain + 1;
  if (threads <= 0) threads = available_cores();
  threads = static_cast<int>(std::min<int64_t>(threads, ranges));

  // Ranges always have `grain` elements, for any number of threads; threads take the next one as
  // they finish.
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr first;
  const auto work = [&] {
    try {
      for (int64_t i; (i = next.fetch_add(1)) < ranges;)
        body(i * grain, std::min(count, i * grain + grain));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      next = ranges;
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads) - 1);
  for (int i = 1; i < threads; ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads available: continue with those started
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace megatron
