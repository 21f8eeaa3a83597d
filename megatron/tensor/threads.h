// CPU threads of tensor operations: how many there are, and work that they divide.
#pragma once

#include <cstdint>
#include <functional>

namespace megatron {

// Sets the number of threads of tensor operations in this process to choose_num_threads(requested,
// local_ranks) (base/threads.h), and logs if OMP_NUM_THREADS leaves cores of the rank unused:
// torchrun sets it to 1 by default. Results do not depend on the number.
void use_threads(int64_t requested, int local_ranks = 1);

// Calls body(begin, end) over parts of [0, count) of at least `grain`, by these threads; what one
// of them throws is thrown. at::parallel_for runs on the calling thread alone where a source is not
// compiled with OpenMP, which is everywhere but here.
void parallel_tasks(int64_t count, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace megatron
