// How many CPU threads tensor operations use.
#pragma once

#include <cstdint>

namespace megatron {

// Gives the tensor operations of this process choose_num_threads(requested, local_ranks) threads
// (base/threads.h), and logs when OMP_NUM_THREADS leaves cores of the rank unused: torchrun sets it
// to 1 unless told otherwise. Results do not depend on the number.
void use_threads(int64_t requested, int local_ranks = 1);

}  // namespace megatron
