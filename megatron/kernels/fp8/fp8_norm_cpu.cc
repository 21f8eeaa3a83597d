#include <vector>

#include "megatron/kernels/detail/fp8_rows_cpu.h"
#include "megatron/kernels/fp8/fp8_norm.h"

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
    cast_row_cpu(args, norm.dtype, values.data(), row, norm.rows, codes);
  }
}

}  // namespace megatron
