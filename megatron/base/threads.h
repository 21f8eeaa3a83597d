// Host threads: how many to use, and a parallel loop whose result does not depend on their number.
#pragma once

#include <cstdint>
#include <functional>

namespace megatron {

// Cores this process may run on (its affinity mask), at least 1.
int available_cores();

// Calls body(begin, end) over disjoint ranges that cover [0, count), on up to `threads` threads (0: available_cores()).
// The first exception thrown by a body is rethrown after all have stopped.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body,
                  int threads = 0);

}  // namespace megatron
