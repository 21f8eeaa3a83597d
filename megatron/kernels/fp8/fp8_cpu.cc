#include <algorithm>
#include <cmath>
#include <vector>

#include "megatron/kernels/detail/amax_cpu.h"
#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/fp8_math.h"
#include "megatron/kernels/fp8/fp8.h"

namespace megatron {
namespace {

template <Fp8Type Type>
void cast_rows(const Fp8Cast& args, int64_t begin, int64_t end) {
  const int64_t n = args.columns;
  float scale = args.amax != nullptr ? fp8_scale(*args.amax, largest_of(Type)) : *args.given_scale;
  if (scale == 0.0f) scale = 1.0f;
  if (begin == 0) {
    args.scale[0] = scale;
    args.scale[kFp8InverseAt] = 1.0f / scale;
  }
  std::vector<float> scratch(n);
  std::vector<uint8_t> codes(n);
  float amax = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = load_run(args.dtype, args.x, row * n, n, scratch.data());
    if (args.new_amax != nullptr) amax = amax_of(x, n, amax);
    for (int64_t i = 0; i < n; ++i) codes[i] = fp8_code<Type>(x[i] * scale);
    if (args.in_rows != nullptr) std::copy(codes.begin(), codes.end(), args.in_rows + row * n);
    if (args.in_columns != nullptr)
      for (int64_t i = 0; i < n; ++i) args.in_columns[i * args.rows + row] = codes[i];
  }
  if (args.new_amax != nullptr) raise_amax(args.new_amax, amax);
}

// One block of 128 rows by 128 columns of x, in fp32.
template <Fp8Type Type>
void cast_block(const Fp8BlockCast& args, int64_t block_row, int64_t block_column, const float* x) {
  constexpr int64_t kB = kFp8Block;
  const int64_t first_row = block_row * kB, first_column = block_column * kB;
  float of_row[kB] = {}, of_column[kB] = {}, of_all = 0.0f;
  for (int64_t r = 0; r < kB; ++r) {
    for (int64_t c = 0; c < kB; ++c) {
      const float size = std::fabs(x[r * kB + c]);
      of_row[r] = size > of_row[r] ? size : of_row[r];
      of_column[c] = size > of_column[c] ? size : of_column[c];
    }
    of_all = std::max(of_all, of_row[r]);
  }
  for (int64_t i = 0; i < kB; ++i) {
    of_row[i] = fp8_power_of_two_scale(args.square ? of_all : of_row[i], largest_of(Type));
    of_column[i] = fp8_power_of_two_scale(args.square ? of_all : of_column[i], largest_of(Type));
  }
  if (args.in_rows != nullptr) {
    for (int64_t r = 0; r < kB; ++r)
      for (int64_t c = 0; c < kB; ++c)
        args.in_rows[(first_row + r) * args.columns + first_column + c] =
            fp8_code<Type>(x[r * kB + c] * of_row[r]);
    if (args.square) {
      args.row_scales[block_row * up4(args.columns / kB) + block_column] = 1.0f / of_row[0];
    } else {
      for (int64_t r = 0; r < kB; ++r)
        args.row_scales[block_column * args.rows + first_row + r] = 1.0f / of_row[r];
    }
  }
  if (args.in_columns != nullptr) {
    for (int64_t c = 0; c < kB; ++c)
      for (int64_t r = 0; r < kB; ++r)
        args.in_columns[(first_column + c) * args.rows + first_row + r] =
            fp8_code<Type>(x[r * kB + c] * of_column[c]);
    if (args.square) {
      args.column_scales[block_column * up4(args.rows / kB) + block_row] = 1.0f / of_column[0];
    } else {
      for (int64_t c = 0; c < kB; ++c)
        args.column_scales[block_row * args.columns + first_column + c] = 1.0f / of_column[c];
    }
  }
}

template <Fp8Type Type>
void cast_blocks(const Fp8BlockCast& args, int64_t begin, int64_t end) {
  constexpr int64_t kB = kFp8Block;
  std::vector<float> block(kB * kB), scratch(kB);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < args.columns / kB; ++j) {
      for (int64_t r = 0; r < kB; ++r) {
        const float* x =
            load_run(args.dtype, args.x, (i * kB + r) * args.columns + j * kB, kB, scratch.data());
        std::copy(x, x + kB, block.data() + r * kB);
      }
      cast_block<Type>(args, i, j, block.data());
    }
  }
}

}  // namespace

void amax_cpu(const Amax& args, int64_t run_begin, int64_t run_end) {
  float scratch[kAmaxRun];
  float amax = 0.0f;
  for (int64_t run = run_begin; run < run_end; ++run) {
    const int64_t at = run * kAmaxRun, n = std::min(kAmaxRun, args.count - at);
    amax = amax_of(load_run(args.dtype, args.x, at, n, scratch), n, amax);
  }
  raise_amax(args.amax, amax);
}

void fp8_cast_cpu(const Fp8Cast& args, int64_t row_begin, int64_t row_end) {
  if (args.type == Fp8Type::kE4M3) {
    cast_rows<Fp8Type::kE4M3>(args, row_begin, row_end);
  } else {
    cast_rows<Fp8Type::kE5M2>(args, row_begin, row_end);
  }
}

void fp8_block_cast_cpu(const Fp8BlockCast& args, int64_t block_begin, int64_t block_end) {
  if (args.type == Fp8Type::kE4M3) {
    cast_blocks<Fp8Type::kE4M3>(args, block_begin, block_end);
  } else {
    cast_blocks<Fp8Type::kE5M2>(args, block_begin, block_end);
  }
}

void delayed_scale_update_cpu(const DelayedScaleUpdate& args) {
  for (int64_t slot = 0; slot < args.slots; ++slot) {
    if (args.keep_unmeasured && args.amax[slot] == 0.0f) continue;
    float* scale = args.state + slot * (1 + args.history_length);
    float* history = scale + 1;
    std::copy_backward(history, history + args.history_length - 1, history + args.history_length);
    history[0] = args.amax[slot];
    args.amax[slot] = 0.0f;
    float amax = history[0];
    if (!args.most_recent)
      for (int64_t i = 1; i < args.history_length; ++i) amax = std::max(amax, history[i]);
    const float largest = largest_of(slot % 3 == 2 ? args.gradient_type : Fp8Type::kE4M3);
    *scale = delayed_scale(amax, largest, args.factor, *scale);
  }
}

}  // namespace megatron
