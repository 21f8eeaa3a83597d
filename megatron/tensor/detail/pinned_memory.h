// Page-locked host memory of exactly the size that is asked for.
#pragma once

#include <cstddef>
#include <memory>

namespace megatron {

// libtorch's allocator rounds sizes up to powers of two, which wastes a quarter of what large
// tensors take. Throws Error if the system gives none, or in a build without CUDA.
std::shared_ptr<void> pinned_memory(size_t bytes);

}  // namespace megatron
