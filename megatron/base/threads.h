// Host threads: their number, and a parallel loop whose result does not depend on it.
#pragma once

#include <cstdint>
#include <functional>

namespace megatron {

// Cores this process may run on (its affinity mask), at least 1.
int available_cores();

// The first number of OMP_NUM_THREADS; 0 if it is unset or not a positive number.
int omp_num_threads();

// CPU threads for one of the `local_ranks` ranks of this node: `requested` (--num-threads) if
// positive, else omp_num_threads(), else the rank's share of available_cores(). At least 1.
int choose_num_threads(int64_t requested, int local_ranks = 1);

// The help text of --num-threads.
inline constexpr char kNumThreadsHelp[] =
    "CPU threads; 0: OMP_NUM_THREADS, else the cores divided by the ranks of this node";

// Calls body(begin, end) over disjoint ranges that cover [0, count), on up to `threads` threads (0:
// available_cores()). The first exception thrown by a body is rethrown after all have stopped.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body,
                  int threads = 0);

}  // namespace megatron
