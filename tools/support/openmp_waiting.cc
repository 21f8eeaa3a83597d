#include "tools/support/openmp_waiting.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "megatron/base/threads.h"

namespace megatron {
namespace {

// On idle cores as fast as libgomp's default of 300,000; if other processes need the cores later, a
// step takes a third of its time with that default (docs/performance.md).
constexpr int kSpinCount = 10000;
constexpr int kSamples = 5;
constexpr std::chrono::milliseconds kBetweenSamples{2};

// Number of runnable threads of other processes; 0: not known.
int runnable_elsewhere() {
  std::ifstream file("/proc/loadavg");
  double load = 0;
  int running = 0;
  for (int i = 0; i < 3; ++i) file >> load;
  // "0.20 0.18 0.12 running/all last_pid"; minus this thread
  return file >> running ? std::max(0, running - 1) : 0;
}

int ranks_of_this_node() {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  return text == nullptr ? 1 : std::max(1, std::atoi(text));
}

}  // namespace

int spin_count(int threads, int cores, std::span<const int> samples) {
  std::vector<int> others(samples.begin(), samples.end());
  if (others.empty()) return kSpinCount;
  const auto middle = others.begin() + static_cast<ptrdiff_t>(others.size() / 2);
  std::nth_element(others.begin(), middle, others.end());
  return *middle + threads > cores ? 0 : kSpinCount;
}

void set_openmp_waiting() {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::vector<int> samples;
  for (int i = 0; i < kSamples; ++i) {
    if (i > 0) std::this_thread::sleep_for(kBetweenSamples);
    samples.push_back(runnable_elsewhere());
  }
  const auto cores = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  const int turns = spin_count(choose_num_threads(0, ranks_of_this_node()), cores, samples);
  ::setenv("GOMP_SPINCOUNT", std::to_string(turns).c_str(), 1);
}

}  // namespace megatron
