#include "megatron/pipeline_parallel/detail/passes.h"

#include <algorithm>

namespace megatron {

PassOrder::PassOrder(const ScheduleShape& shape)
    : num_stages_(shape.num_stages),
      num_chunks_(shape.num_chunks),
      group_size_(shape.group_size > 0 ? shape.group_size : shape.num_stages) {
  for (int first = 0; first < shape.num_microbatches; first += group_size_)
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk)
      for (int m = first; m < std::min(first + group_size_, shape.num_microbatches); ++m)
        forward_.push_back({Action::Kind::kForward, chunk, m});
}

int PassOrder::warm_up(int stage) const {
  const int after = num_stages_ - stage - 1;  // stages after this one
  return std::min(num_chunks_ == 1 ? after : 2 * after + (num_chunks_ - 1) * group_size_, size());
}

}  // namespace megatron
