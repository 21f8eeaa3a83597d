#include <vector>

#include "megatron/kernels/detail/fp8_rows_cpu.h"
#include "megatron/kernels/fp8/fp8_activation.h"

namespace megatron {

void fp8_activation_cpu(const Fp8Activation& args, int64_t row_begin, int64_t row_end) {
  const ActivationArgs& a = args.activation;
  const int64_t columns = args.backward ? 2 * a.features : a.features, bytes = size_of(a.dtype);
  std::vector<char> row_of(static_cast<size_t>(columns * bytes));
  std::vector<uint8_t> codes(static_cast<size_t>(columns));
  for (int64_t row = row_begin; row < row_end; ++row) {
    ActivationArgs one = a;
    one.rows = 1;
    one.x = static_cast<const char*>(a.x) + row * 2 * a.features * bytes;
    if (args.backward) one.dy = static_cast<const char*>(a.dy) + row * a.features * bytes;
    one.out = row_of.data();
    one.amax = nullptr;
    args.backward ? activation_backward_cpu(one, 0, 1) : activation_forward_cpu(one, 0, 1);
    cast_row_cpu(args, a.dtype, row_of.data(), row, a.rows, codes);
  }
}

void fp8_block_activation_cpu(const Fp8BlockActivation& args, int64_t block_begin,
                              int64_t block_end) {
  // The result of these rows only, at their position in the whole matrix.
  const ActivationArgs& a = args.activation;
  const int64_t begin = block_begin * kFp8Block, rows = (block_end - block_begin) * kFp8Block;
  const int64_t columns = args.cast.columns, bytes = size_of(a.dtype);
  std::vector<char> result(static_cast<size_t>(rows * columns * bytes));
  ActivationArgs part = a;
  part.rows = rows;
  part.x = static_cast<const char*>(a.x) + begin * 2 * a.features * bytes;
  if (args.backward) part.dy = static_cast<const char*>(a.dy) + begin * a.features * bytes;
  part.out = result.data();
  part.amax = nullptr;
  args.backward ? activation_backward_cpu(part, 0, rows) : activation_forward_cpu(part, 0, rows);
  for (int64_t block = block_begin; block < block_end; ++block) {
    Fp8BlockCast cast = args.cast;
    cast.x = result.data() - begin * columns * bytes;
    fp8_block_cast_cpu(cast, block, block + 1);
  }
}

}  // namespace megatron
