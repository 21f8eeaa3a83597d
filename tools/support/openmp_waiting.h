// How OpenMP's threads wait for each other: libgomp spins before it sleeps, by default for
// milliseconds. If other processes need the cores, a spinning thread takes CPU time from the thread
// it waits for (measurements: docs/performance.md).
#pragma once

#include <span>

namespace megatron {

// Turns of the spin loop before a thread sleeps (GOMP_SPINCOUNT): 0 if this process's `threads`
// plus the median of `samples` (runnable threads of other processes) exceed `cores`; else long
// enough for the pauses between parallel loops.
int spin_count(int threads, int cores, std::span<const int> samples);

// Sets GOMP_SPINCOUNT for libgomp, which reads it once, when it is loaded. Samples the machine for
// 10 ms. Does nothing if the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT.
void set_openmp_waiting();

}  // namespace megatron
