// The only reduction that CPU backends use, so that ranks as threads and ranks as processes give
// identical bits.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/comm/reduce_op.h"

namespace megatron {

// output[i] = inputs[0][i] op inputs[1][i] op ..., in this order; bf16 and fp16 in fp32, rounded
// once. `output` may be one of the inputs only if it is the first.
void reduce_in_order(const std::vector<const char*>& inputs, char* output, int64_t count,
                     DType dtype, ReduceOp op);

}  // namespace megatron
