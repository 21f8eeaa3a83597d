// Conversion between floating element types, rounding to nearest even.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// Both floating: F64, F32, BF16, F16.
bool is_convertible(DType from, DType to);
void convert_elements(const void* in, DType from, void* out, DType to, int64_t count);

}  // namespace megatron
