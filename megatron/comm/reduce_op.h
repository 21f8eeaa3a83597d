// How the values of several ranks become one.
#pragma once

#include <cstdint>

namespace megatron {

enum class ReduceOp : uint8_t { kSum, kMax };

}  // namespace megatron
