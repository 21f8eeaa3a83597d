#include "megatron/base/check.h"
#include "megatron/tensor/detail/pinned_memory.h"

namespace megatron {

std::shared_ptr<void> pinned_memory(size_t) { throw Error("this build has no CUDA"); }

}  // namespace megatron
