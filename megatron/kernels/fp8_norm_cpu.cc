#include <algorithm>
#include <vector>

#include "megatron/kernels/fp8_norm.h"

namespace megatron {

void fp8_norm_cpu(const Fp8Norm& args, int64_t row_begin, int64_t row_end) {
  const NormForward& norm = args.norm;
  const int64_t n = norm.columns, bytes = size_of(norm.dtype), statistic = size_of(DType::kFloat32);
  std::vector<char> values(static_cast<size_t>(n * bytes));
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  for (int64_t row = row_begin; row < row_end; ++row) {
    NormForward one = norm;
    one.rows = 1;
    one.x = static_cast<const char*>(norm.x) + row * n * bytes;
    one.y = values.data();
    one.amax = nullptr;
    if (norm.layer_norm) one.mean = static_cast<char*>(norm.mean) + row * statistic;
    one.rstd = static_cast<char*>(norm.rstd) + row * statistic;
    norm_forward_cpu(one, 0, 1);
    float scale[kFp8ScaleElements];
    Fp8Cast cast;
    cast.dtype = norm.dtype;
    cast.type = args.type;
    cast.rows = 1;
    cast.columns = n;
    cast.x = values.data();
    cast.given_scale = args.given_scale;
    cast.new_amax = args.new_amax;
    cast.scale = row == 0 ? args.scale : scale;
    cast.in_rows = codes.data();
    fp8_cast_cpu(cast, 0, 1);
    std::copy(codes.begin(), codes.end(), args.in_rows + row * n);
    if (args.in_columns != nullptr)
      for (int64_t i = 0; i < n; ++i) args.in_columns[i * norm.rows + row] = codes[i];
  }
}

}  // namespace megatron
