#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/detail/norm_rows.cuh"
#include "megatron/kernels/fp8/fp8_rows.h"

namespace megatron {
namespace {

constexpr int kFewThreads = 256, kManyThreads = 1024, kMostGroups = 8;

// What a thread holds of a row: groups of 8 columns, as many threads apart as the block has.
template <class T, int Groups>
struct HeldRow {
  Eight<T> at[Groups];

  // f(value of 8 floats, first column) for each group within the row; what it leaves is kept.
  template <class F>
  __device__ __forceinline__ void each(int64_t columns, const F& f) {
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      const int64_t column = (threadIdx.x + int64_t{g} * blockDim.x) * kThreadColumns;
      if (column >= columns) return;
      float values[kThreadColumns];
      at[g].get(values);
      f(values, column, g);
    }
  }
};

// The rows as they are.
template <class T>
struct Values {
  template <class Row>
  static __device__ __forceinline__ void make(const Fp8Rows& args, int64_t row, Row& held, float*) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    held.each(args.columns, [&](float (&)[kThreadColumns], int64_t column, int g) {
      held.at[g].load(x + column);
    });
  }
};

// A norm whose gain and bias have type W.
template <class T, class W, bool LayerNorm>
struct Normed {
  template <class Row>
  static __device__ __forceinline__ void make(const Fp8Rows& args, int64_t row, Row& held,
                                              float* shared) {
    Values<T>::make(args, row, held, shared);
    const auto count = static_cast<float>(args.columns);
    float mean = 0.0f, sum = 0.0f;
    if constexpr (LayerNorm) {
      held.each(args.columns, [&](float (&x)[kThreadColumns], int64_t, int) {
        for (const float value : x) sum += value;
      });
      mean = reduce_block(sum, AddOp{}, shared) / count;
      sum = 0.0f;
    }
    held.each(args.columns, [&](float (&x)[kThreadColumns], int64_t, int) {
      for (const float value : x) sum += (value - mean) * (value - mean);
    });
    const float variance = reduce_block(sum, AddOp{}, shared) / count,
                rstd = 1.0f / sqrtf(variance + static_cast<float>(args.norm.eps));
    held.each(args.columns, [&](float (&x)[kThreadColumns], int64_t column, int g) {
      float gain[kThreadColumns], bias[kThreadColumns] = {};
      load_gain<W>(args.norm, column, gain);
      const bool biased = LayerNorm && args.norm.bias != nullptr;
      if (biased) load_weights<W>(args.norm.bias, column, bias);
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        const float scaled = (x[c] - mean) * rstd * gain[c];
        x[c] = biased ? scaled + bias[c] : scaled;  // a zero keeps its sign
      }
      held.at[g].set(x);
    });
  }
};

template <class T, class Gate>
struct Activated {
  template <class Row>
  static __device__ __forceinline__ void make(const Fp8Rows& args, int64_t row, Row& held, float*) {
    const T* gates = static_cast<const T*>(args.x) + row * 2 * args.columns;
    const T* ups = gates + args.columns;
    const auto offset = static_cast<float>(args.activation.offset);
    const float factor = args.factors != nullptr ? args.factors[row] : 1.0f;
    held.each(args.columns, [&](float (&y)[kThreadColumns], int64_t column, int g) {
      Eight<T> in;
      float up[kThreadColumns];
      in.load(gates + column);
      in.get(y);
      in.load(ups + column);
      in.get(up);
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c)
        y[c] = Gate::at(y[c] * factor).act * (up[c] * factor + offset);
      held.at[g].set(y);
    });
  }
};

// One thread block per row.
template <class T, class Source, int Groups, int Threads>
__global__ void __launch_bounds__(Threads) fp8_rows_kernel(Fp8Rows args) {
  __shared__ float shared[33];
  const int64_t row = reverse_block();
  HeldRow<T, Groups> held = {};
  Source::make(args, row, held, shared);
  float amax = 0.0f;
  held.each(args.columns, [&](float (&values)[kThreadColumns], int64_t, int) {
    for (const float value : values) amax = larger(amax, value);
  });
  amax = reduce_block(amax, MaxOp{}, shared);
  const float scale = fp8_power_of_two_scale(amax, largest_of(Fp8Type::kE4M3));
  if (threadIdx.x == 0) args.inverse_scales[row] = 1.0f / scale;
  uint8_t* codes = args.codes + row * args.columns;
  held.each(args.columns, [&](float (&x)[kThreadColumns], int64_t column, int) {
    for (float& value : x) value *= scale;
    *reinterpret_cast<uint2*>(codes + column) =
        make_uint2(codes_of<Fp8Type::kE4M3>(x[0], x[1], x[2], x[3]),
                   codes_of<Fp8Type::kE4M3>(x[4], x[5], x[6], x[7]));
  });
}

template <class T, class Source>
void launch(const Fp8Rows& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.rows);
  const int64_t groups = (args.columns / kThreadColumns + kFewThreads - 1) / kFewThreads;
  if (groups <= 1) {
    fp8_rows_kernel<T, Source, 1, kFewThreads><<<blocks, kFewThreads, 0, stream>>>(args);
  } else if (groups <= 2) {
    fp8_rows_kernel<T, Source, 2, kFewThreads><<<blocks, kFewThreads, 0, stream>>>(args);
  } else if (groups <= kMostGroups) {
    fp8_rows_kernel<T, Source, kMostGroups, kFewThreads><<<blocks, kFewThreads, 0, stream>>>(args);
  } else {
    fp8_rows_kernel<T, Source, kMostGroups, kManyThreads>
        <<<blocks, kManyThreads, 0, stream>>>(args);
  }
}

template <class T>
void launch_activation(const Fp8Rows& args, cudaStream_t stream) {
  switch (args.activation.kind) {
    case Activation::kSwiglu:
      return launch<T, Activated<T, SiluGate>>(args, stream);
    case Activation::kGeglu:
      return launch<T, Activated<T, GeluTanhGate>>(args, stream);
    case Activation::kQuickGeglu:
      return launch<T, Activated<T, QuickGeluGate>>(args, stream);
    case Activation::kExactGeglu:
      return launch<T, Activated<T, GeluGate>>(args, stream);
    default:
      MEGATRON_ASSERT(false, "FP8 rows of an activation that is not gated");
  }
}

template <class T>
void launch_norm(const Fp8Rows& args, cudaStream_t stream) {
  with_weight_type<T>(args.norm, [&](auto weight) {
    using W = decltype(weight);
    args.norm.layer_norm ? launch<T, Normed<T, W, true>>(args, stream)
                         : launch<T, Normed<T, W, false>>(args, stream);
  });
}

// A thread has 8 elements.
template <class T>
__global__ void __launch_bounds__(kFewThreads) row_factors_kernel(RowFactors a, int64_t all) {
  const int64_t at = (int64_t{blockIdx.x} * kFewThreads + threadIdx.x) * kThreadColumns;
  if (at >= all) return;
  const float factor = a.factors[at / a.columns];
  Eight<T> held;
  float y[kThreadColumns];
  T* to = static_cast<T*>(a.y) + at;
  held.load(to);
  held.get(y);
#pragma unroll
  for (float& value : y) value *= factor;
  const auto add = [&](const void* from, int64_t first) {
    float more[kThreadColumns];
    held.load(static_cast<const T*>(from) + first);
    held.get(more);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) y[c] += more[c];
  };
  if (a.bias != nullptr) add(a.bias, at % a.columns);
  if (a.addend != nullptr) add(a.addend, at);
  held.set(y);
#pragma unroll
  for (int i = 0; i < Eight<T>::kPacks; ++i)
    *reinterpret_cast<uint4*>(to + i * Eight<T>::kSize) = held.packs[i];
}

}  // namespace

void row_factors_cuda(const RowFactors& args, void* stream) {
  MEGATRON_ASSERT(
      args.columns % kThreadColumns == 0 && is_aligned({args.y, args.bias, args.addend}),
      "factors of rows of ", args.columns,
      " elements: expected a multiple of 8, "
      "16-byte aligned");
  const int64_t all = args.rows * args.columns, each = int64_t{kFewThreads} * kThreadColumns;
  if (all == 0) return;
  with_cast_type(args.dtype, [&](auto x) {
    using T = decltype(x);
    row_factors_kernel<T>
        <<<static_cast<unsigned>((all + each - 1) / each), kFewThreads, 0, as_stream(stream)>>>(
            args, all);
  });
  check_cuda(cudaGetLastError(), "factors of rows");
}

void fp8_rows_cuda(const Fp8Rows& args, void* stream) {
  MEGATRON_ASSERT(args.columns % 16 == 0 && args.columns <= kMostFp8RowColumns &&
                      is_aligned({args.x, args.norm.gain, args.norm.bias, args.codes}),
                  "FP8 rows of [", args.rows, ", ", args.columns,
                  "]: expected a multiple of 16 columns, at most ", kMostFp8RowColumns,
                  ", 16-byte aligned");
  MEGATRON_ASSERT(args.factors == nullptr || args.of == Fp8RowsOf::kActivation,
                  "factors of rows that are not activated");
  if (args.rows == 0 || args.columns == 0) return;
  with_cast_type(args.dtype, [&](auto x) {
    using T = decltype(x);
    switch (args.of) {
      case Fp8RowsOf::kValues:
        return launch<T, Values<T>>(args, as_stream(stream));
      case Fp8RowsOf::kNorm:
        return launch_norm<T>(args, as_stream(stream));
      case Fp8RowsOf::kActivation:
        return launch_activation<T>(args, as_stream(stream));
    }
  });
  check_cuda(cudaGetLastError(), "FP8 rows");
}

}  // namespace megatron
