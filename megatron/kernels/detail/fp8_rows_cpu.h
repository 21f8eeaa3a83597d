// CPU counterparts of kernels that write FP8 instead of their result, a row at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megatron/kernels/fp8/fp8.h"

namespace megatron {

// Casts `row` of a result [rows, codes.size()], whose values are `values`, with the scale and into
// the outputs of `args` (Fp8Norm, Fp8Activation); `codes` is scratch memory for a row.
template <class Args>
void cast_row_cpu(const Args& args, DType dtype, const void* values, int64_t row, int64_t rows,
                  std::vector<uint8_t>& codes) {
  const auto columns = static_cast<int64_t>(codes.size());
  float scale[kFp8ScaleElements];
  Fp8Cast cast;
  cast.dtype = dtype;
  cast.type = args.type;
  cast.rows = 1;
  cast.columns = columns;
  cast.x = values;
  cast.given_scale = args.given_scale;
  cast.new_amax = args.new_amax;
  cast.scale = row == 0 ? args.scale : scale;
  cast.in_rows = codes.data();
  fp8_cast_cpu(cast, 0, 1);
  if (args.in_rows != nullptr) std::copy(codes.begin(), codes.end(), args.in_rows + row * columns);
  if (args.in_columns != nullptr)
    for (int64_t i = 0; i < columns; ++i) args.in_columns[i * rows + row] = codes[i];
}

}  // namespace megatron
