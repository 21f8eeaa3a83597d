#include <vector>

#include "megatron/base/check.h"
#include "megatron/kernels/detail/fp8_math.h"
#include "megatron/kernels/fp8/fp8_rows.h"

namespace megatron {
namespace {

// What is cast of a row; `made` is memory for it.
const void* row_of(const Fp8Rows& args, int64_t row, std::vector<char>& made) {
  const int64_t width = args.of == Fp8RowsOf::kActivation ? 2 * args.columns : args.columns;
  const char* x = static_cast<const char*>(args.x) + row * width * size_of(args.dtype);
  if (args.of == Fp8RowsOf::kValues) return x;
  if (args.of == Fp8RowsOf::kNorm) {
    double mean = 0.0, rstd = 0.0;  // large enough for either type
    NormForward one = args.norm;
    one.dtype = args.dtype;
    one.rows = 1;
    one.columns = args.columns;
    one.x = x;
    one.y = made.data();
    one.mean = &mean;
    one.rstd = &rstd;
    one.amax = nullptr;
    norm_forward_cpu(one, 0, 1);
    return made.data();
  }
  ActivationArgs one = args.activation;
  one.dtype = args.dtype;
  one.rows = 1;
  one.features = args.columns;
  one.x = x;
  one.out = made.data();
  one.amax = nullptr;
  activation_forward_cpu(one, 0, 1);
  return made.data();
}

}  // namespace

void fp8_rows_cpu(const Fp8Rows& args, int64_t row_begin, int64_t row_end) {
  MEGATRON_ASSERT(args.factors == nullptr, "products on CPUs have the scales of their rows");
  std::vector<char> made(static_cast<size_t>(args.columns * size_of(args.dtype)));
  for (int64_t row = row_begin; row < row_end; ++row) {
    float largest = 0.0f, scale[kFp8ScaleElements];
    Amax amax;
    amax.dtype = args.dtype;
    amax.count = args.columns;
    amax.x = row_of(args, row, made);
    amax.amax = &largest;
    amax_cpu(amax, 0, (args.columns + kAmaxRun - 1) / kAmaxRun);
    const float given = fp8_power_of_two_scale(largest, largest_of(Fp8Type::kE4M3));
    Fp8Cast cast;
    cast.dtype = args.dtype;
    cast.rows = 1;
    cast.columns = args.columns;
    cast.x = amax.x;
    cast.given_scale = &given;
    cast.scale = scale;
    cast.in_rows = args.codes + row * args.columns;
    fp8_cast_cpu(cast, 0, 1);
    args.inverse_scales[row] = scale[kFp8InverseAt];
  }
}

}  // namespace megatron
