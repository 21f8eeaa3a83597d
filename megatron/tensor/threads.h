// How many CPU threads tensor operations use.
#pragma once

#include <cstdint>

namespace megatron {

// Sets the number of threads of tensor operations in this process to choose_num_threads(requested,
// local_ranks) (base/threads.h), and logs if OMP_NUM_THREADS leaves cores of the rank unused:
// torchrun sets it to 1 by default. Results do not depend on the number.
void use_threads(int64_t requested, int local_ranks = 1);

}  // namespace megatron
