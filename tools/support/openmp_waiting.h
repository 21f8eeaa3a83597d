// How OpenMP's threads wait for each other: libgomp spins before it sleeps, for milliseconds by
// default. Where other processes want the cores, a spinning thread takes the time of the one it
// waits for (docs/performance.md has the measurements).
#pragma once

#include <span>

namespace megatron {

// Turns of the spin loop before a thread sleeps (GOMP_SPINCOUNT): 0 where this process's `threads`
// and the other processes that want to run, by the median of `samples`, are more than `cores`; else
// enough for the pauses between parallel loops.
int spin_count(int threads, int cores, std::span<const int> samples);

// Sets GOMP_SPINCOUNT for libgomp, which reads it once, when it is loaded. Looks at the machine for
// 10 ms. Does nothing when the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT.
void set_openmp_waiting();

}  // namespace megatron
