// How values of several ranks are combined.
#pragma once

#include <cstdint>

namespace megatron {

enum class ReduceOp : uint8_t { kSum, kMax };

}  // namespace megatron
