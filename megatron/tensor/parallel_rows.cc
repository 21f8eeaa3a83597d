// The one source that is compiled with OpenMP: at::parallel_for is a template that runs on the
// calling thread alone elsewhere.
#include <ATen/Parallel.h>

#include <algorithm>

#include "megatron/tensor/detail/launch.h"

#ifndef INTRA_OP_PARALLEL
#error "compile this source with -fopenmp"
#endif

namespace megatron {

void parallel_tasks(int64_t count, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body) {
  at::parallel_for(0, count, grain, body);
}

void parallel_rows(int64_t rows, int64_t row_elements,
                   const std::function<void(int64_t begin, int64_t end)>& body) {
  constexpr int64_t kTaskElements = int64_t{1} << 19;  // below it, waiting for threads costs more
  parallel_tasks(rows, std::max<int64_t>(1, kTaskElements / row_elements), body);
}

}  // namespace megatron
