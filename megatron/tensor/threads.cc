#include "megatron/tensor/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"

namespace megatron {

void use_threads(int64_t requested, int local_ranks) {
  const int threads = choose_num_threads(requested, local_ranks);
  const int share = std::max(1, available_cores() / std::max(1, local_ranks));
  if (requested <= 0 && omp_num_threads() > 0 && threads < share)
    log_info(cat(threads, threads == 1 ? " CPU thread" : " CPU threads",
                 " per rank, as OMP_NUM_THREADS says, of ", share,
                 " cores; --num-threads or OMP_NUM_THREADS change that"));
  at::set_num_threads(threads);
}

}  // namespace megatron
