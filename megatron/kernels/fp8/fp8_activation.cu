#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/fp8/fp8_activation.h"

namespace megatron {
namespace {

// A value rounded as it would be stored, so that amax and FP8 value equal those of the stored
// tensor.
template <class T>
__device__ __forceinline__ float rounded(float value) {
  T stored;
  store_as(stored, value);
  return load_as<float>(stored);
}

// One thread block per tile of the result; in the backward, per tile of both its halves.
template <class T, class Gate, Fp8Type Type, bool Backward>
__global__ void __launch_bounds__(256) fp8_activation_kernel(Fp8Activation args) {
  __shared__ __align__(16) uint32_t turned[(Backward ? 2 : 1) * kTileWords];
  __shared__ float shared[33];
  const int64_t rows = args.activation.rows, f = args.activation.features;
  const TilePlace at(reverse_block(), rows, f);
  const T* x = static_cast<const T*>(args.activation.x);
  const T* dy = static_cast<const T*>(args.activation.dy);
  Eight<T> gates[kThreadRows] = {}, ups[kThreadRows] = {}, grads[kThreadRows] = {};
  if (at.inside) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      gates[r].load(x + (at.row + r) * 2 * f + at.column);
      ups[r].load(x + (at.row + r) * 2 * f + f + at.column);
      if constexpr (Backward) grads[r].load(dy + (at.row + r) * f + at.column);
    }
  }
  const float given = *args.given_scale, scale = given == 0.0f ? 1.0f : given;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.scale[0] = scale;
    args.scale[kFp8InverseAt] = 1.0f / scale;
  }
  const float offset = static_cast<float>(args.activation.offset);
  TileCodes first, second;  // y, or dgate and dup
  float amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float a[kThreadColumns], b[kThreadColumns], grad[kThreadColumns];
    gates[r].get(a);
    ups[r].get(b);
    if constexpr (Backward) grads[r].get(grad);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const GateValue<float> gate = Gate::at(a[c]);
      const float up = b[c] + offset;
      if constexpr (Backward) {
        a[c] = rounded<T>(grad[c] * gate.slope * up);
        b[c] = rounded<T>(grad[c] * gate.act);
        amax = larger(amax, b[c]);
        b[c] *= scale;
      } else {
        a[c] = rounded<T>(gate.act * up);
      }
      amax = larger(amax, a[c]);
      a[c] *= scale;
    }
    first.left[r] = codes_of<Type>(a[0], a[1], a[2], a[3]);
    first.right[r] = codes_of<Type>(a[4], a[5], a[6], a[7]);
    if constexpr (Backward) {
      second.left[r] = codes_of<Type>(b[0], b[1], b[2], b[3]);
      second.right[r] = codes_of<Type>(b[4], b[5], b[6], b[7]);
    }
  }
  const int64_t stride = Backward ? 2 * f : f;
  store_rows(first, at, args.in_rows, stride);
  if constexpr (Backward) store_rows(second, at, args.in_rows + f, stride);
  // Outside the matrix gates are 0, and so are the results.
  if (args.new_amax != nullptr) raise_amax(args.new_amax, at.inside ? amax : 0.0f, shared);
  if (args.in_columns == nullptr) return;
  turn_codes(first, at, turned);
  if constexpr (Backward) turn_codes(second, at, turned + kTileWords);
  __syncthreads();
  store_columns(turned, at, args.in_columns, rows, f);
  if constexpr (Backward)
    store_columns(turned + kTileWords, at, args.in_columns + f * rows, rows, f);
}

template <class T, class Gate>
void launch_gate(const Fp8Activation& args, cudaStream_t stream) {
  const auto tiles =
      static_cast<unsigned>(num_tiles(args.activation.rows, args.activation.features));
  with_fp8_type(args.type, [&](auto type) {
    if (args.backward) {
      fp8_activation_kernel<T, Gate, type(), true><<<tiles, 256, 0, stream>>>(args);
    } else {
      fp8_activation_kernel<T, Gate, type(), false><<<tiles, 256, 0, stream>>>(args);
    }
  });
}

// One thread block per 128 x 128 of the result; in the backward, of both its halves.
template <class T, class Gate, Fp8Type Type, bool Backward>
__global__ void __launch_bounds__(kBlockThreads, 2)
    fp8_block_activation_kernel(Fp8BlockActivation args) {
  __shared__ BlockMemory memory;
  const int64_t f = args.activation.features;
  const BlockPlace at(reverse_block(), f);
  const T* x = static_cast<const T*>(args.activation.x) + at.row() * 2 * f + at.column();
  const T* dy = static_cast<const T*>(args.activation.dy) + at.row() * f + at.column();
  const float offset = static_cast<float>(args.activation.offset);
  BlockValues<T> first, second, grads;  // gates and ups, then y, or dgate and dup
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    first[r].load(x + r * 2 * f);
    second[r].load(x + r * 2 * f + f);
    if constexpr (Backward) grads[r].load(dy + r * f);
  }
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float a[kThreadColumns], b[kThreadColumns], grad[kThreadColumns];
    first[r].get(a);
    second[r].get(b);
    if constexpr (Backward) grads[r].get(grad);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const GateValue<float> gate = Gate::at(a[c]);
      const float up = b[c] + offset;
      if constexpr (Backward) {
        a[c] = grad[c] * gate.slope * up;
        b[c] = grad[c] * gate.act;
      } else {
        a[c] = gate.act * up;
      }
    }
    first[r].set(a);
    if constexpr (Backward) second[r].set(b);
  }
  store_block<T, Type>(first, at, args.cast, at.block_column, memory);
  if constexpr (Backward) {
    __syncthreads();
    store_block<T, Type>(second, at, args.cast, at.block_column + f / kBlockSize, memory);
  }
}

template <class T, class Gate>
void launch_gate(const Fp8BlockActivation& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.activation.rows / kFp8Block *
                                            (args.activation.features / kFp8Block));
  with_fp8_type(args.cast.type, [&](auto type) {
    if (args.backward) {
      fp8_block_activation_kernel<T, Gate, type(), true>
          <<<blocks, kBlockThreads, 0, stream>>>(args);
    } else {
      fp8_block_activation_kernel<T, Gate, type(), false>
          <<<blocks, kBlockThreads, 0, stream>>>(args);
    }
  });
}

template <class Args>
void launch(const Args& args, void* stream) {
  with_cast_type(args.activation.dtype, [&](auto type) {
    using T = decltype(type);
    switch (args.activation.kind) {
      case Activation::kSwiglu:
        return launch_gate<T, SiluGate>(args, as_stream(stream));
      case Activation::kGeglu:
        return launch_gate<T, GeluTanhGate>(args, as_stream(stream));
      case Activation::kQuickGeglu:
        return launch_gate<T, QuickGeluGate>(args, as_stream(stream));
      case Activation::kExactGeglu:
        return launch_gate<T, GeluGate>(args, as_stream(stream));
      default:
        MEGATRON_ASSERT(false, "FP8 output of an activation that is not gated");
    }
  });
  check_cuda(cudaGetLastError(), "FP8 activation");
}

}  // namespace

void fp8_activation_cuda(const Fp8Activation& args, void* stream) {
  const ActivationArgs& a = args.activation;
  MEGATRON_ASSERT(a.rows % 16 == 0 && a.features % 16 == 0 &&
                      is_aligned({a.x, a.dy, args.in_rows, args.in_columns}),
                  "FP8 activation of [", a.rows, ", ", a.features,
                  "]: expected multiples of 16, 16-byte aligned");
  if (a.rows == 0 || a.features == 0) return;
  launch(args, stream);
}

void fp8_block_activation_cuda(const Fp8BlockActivation& args, void* stream) {
  const ActivationArgs& a = args.activation;
  MEGATRON_ASSERT(a.rows % kFp8Block == 0 && a.features % kFp8Block == 0 && !args.cast.square &&
                      is_aligned({a.x, a.dy, args.cast.in_rows, args.cast.in_columns}),
                  "FP8 blocks of an activation of [", a.rows, ", ", a.features,
                  "]: expected multiples of 128, 16-byte aligned");
  if (a.rows == 0 || a.features == 0) return;
  launch(args, stream);
}

}  // namespace megatron
