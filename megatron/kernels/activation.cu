#include <algorithm>

#include "megatron/kernels/activation.h"
#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/early_start.cuh"

namespace megatron {
namespace {

// The largest magnitude of the group, after rounding to the stored type.
template <class Group>
__device__ __forceinline__ float largest_in(const Group& group, float amax) {
#pragma unroll
  for (int j = 0; j < Group::kSize; ++j) amax = larger(amax, load_as<float>(group.at[j]));
  return amax;
}

// A thread processes kSize consecutive elements: one pack, or one element if the shape does not
// allow packs. A block of threads takes a tile, blockDim.x groups of one row; tiles blockIdx.x,
// blockIdx.x + gridDim.x, ...
template <class T, class Gate, bool InPacks, bool Measured, bool Backward>
__global__ void gated_kernel(ActivationArgs args, uint32_t tiles_of_row) {
  let_next_kernel_begin();
  using Acc = AccumulateType<T>;
  using Group = std::conditional_t<InPacks, Pack<T>, Single<T>>;
  const T* x = static_cast<const T*>(args.x);
  const T* dy = static_cast<const T*>(args.dy);
  T* out = static_cast<T*>(args.out);
  const Acc offset = static_cast<Acc>(args.offset);
  float amax = 0.0f;
  const int64_t f = args.features;
  const uint32_t tiles = static_cast<uint32_t>(args.rows) * tiles_of_row;
  for (uint32_t turn = blockIdx.x; turn < tiles; turn += gridDim.x) {
    const uint32_t tile = tiles - 1 - turn;  // Note [Backwards]
    const int64_t row = tile / tiles_of_row;
    const int64_t column = (int64_t{tile % tiles_of_row} * blockDim.x + threadIdx.x) * Group::kSize;
    if (column >= f) continue;
    const int64_t i = row * f + column,
                  at = i + row * f;  // index of the gate; its partner lies f further
    const Group gates = load_group<Group>(x + at), ups = load_group<Group>(x + at + f);
    if constexpr (Backward) {
      const Group grads = load_group<Group>(dy + i);
      Group dgate, dup;
#pragma unroll
      for (int j = 0; j < Group::kSize; ++j) {
        const GateValue<Acc> gate = Gate::at(load_as<Acc>(gates.at[j]));
        const Acc grad = load_as<Acc>(grads.at[j]);
        store_as(dgate.at[j], grad * gate.slope * (load_as<Acc>(ups.at[j]) + offset));
        store_as(dup.at[j], grad * gate.act);
      }
      store_group(out + at, dgate);
      store_group(out + at + f, dup);
      if constexpr (Measured) amax = largest_in(dup, largest_in(dgate, amax));
    } else {
      Group y;
#pragma unroll
      for (int j = 0; j < Group::kSize; ++j) {
        const GateValue<Acc> gate = Gate::at(load_as<Acc>(gates.at[j]));
        store_as(y.at[j], gate.act * (load_as<Acc>(ups.at[j]) + offset));
      }
      store_group(out + i, y);
      if constexpr (Measured) amax = largest_in(y, amax);
    }
  }
  if constexpr (Measured) {
    __shared__ float shared[33];
    raise_amax(args.amax, amax, shared);
  }
}

template <class T, class Gate, bool InPacks, bool Measured>
__global__ void plain_kernel(ActivationArgs args, bool backward) {
  using Acc = AccumulateType<T>;
  using Group = std::conditional_t<InPacks, Pack<T>, Single<T>>;
  const T* x = static_cast<const T*>(args.x);
  const T* dy = static_cast<const T*>(args.dy);
  T* out = static_cast<T*>(args.out);
  const int64_t groups = args.rows * args.features / Group::kSize,
                step = int64_t{gridDim.x} * blockDim.x;
  float amax = 0.0f;
  for (int64_t g = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; g < groups; g += step) {
    const int64_t i = (groups - 1 - g) * Group::kSize;  // Note [Backwards]
    const Group values = load_group<Group>(x + i);
    Group grads = {}, y;
    if (backward) grads = load_group<Group>(dy + i);
#pragma unroll
    for (int j = 0; j < Group::kSize; ++j) {
      const GateValue<Acc> value = Gate::at(load_as<Acc>(values.at[j]));
      store_as(y.at[j], backward ? load_as<Acc>(grads.at[j]) * value.slope : value.act);
    }
    store_group(out + i, y);
    if constexpr (Measured) amax = largest_in(y, amax);
  }
  if constexpr (Measured) {
    __shared__ float shared[33];
    raise_amax(args.amax, amax, shared);
  }
}

template <class T, class Gate, bool Gated, bool InPacks, bool Measured>
void launch_form(const ActivationArgs& args, bool backward, cudaStream_t stream) {
  constexpr int kSize = InPacks ? Pack<T>::kSize : 1;
  const auto limited = [](int64_t blocks) {
    return static_cast<unsigned>(Measured ? std::min<int64_t>(blocks, kAmaxBlocks) : blocks);
  };
  if constexpr (Gated) {
    const int64_t groups = args.features / kSize;
    const auto threads =
        static_cast<unsigned>(std::min<int64_t>(kThreads, (groups + 31) / 32 * 32));
    const auto tiles_of_row = static_cast<uint32_t>((groups + threads - 1) / threads);
    MEGATRON_ASSERT(args.rows * tiles_of_row <= INT32_MAX, "an activation of ", args.rows,
                    " rows of ", args.features);
    const unsigned blocks = limited(args.rows * tiles_of_row);
    const auto kernel = backward ? gated_kernel<T, Gate, InPacks, Measured, true>
                                 : gated_kernel<T, Gate, InPacks, Measured, false>;
    kernel<<<blocks, threads, 0, stream>>>(args, tiles_of_row);
  } else {
    const unsigned blocks = limited(blocks_for(args.rows * args.features / kSize));
    plain_kernel<T, Gate, InPacks, Measured><<<blocks, kThreads, 0, stream>>>(args, backward);
  }
}

template <class T, class Gate, bool Gated>
void launch_kernel(const ActivationArgs& args, bool backward, cudaStream_t stream) {
  if (args.rows * args.features == 0) return;
  const bool packs = fits_packs<T>(args.features, {args.x, args.dy, args.out});
  if (args.amax != nullptr) {
    packs ? launch_form<T, Gate, Gated, true, true>(args, backward, stream)
          : launch_form<T, Gate, Gated, false, true>(args, backward, stream);
  } else {
    packs ? launch_form<T, Gate, Gated, true, false>(args, backward, stream)
          : launch_form<T, Gate, Gated, false, false>(args, backward, stream);
  }
}

void run(const ActivationArgs& args, bool backward, void* stream) {
  with_cuda_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const cudaStream_t s = as_stream(stream);
    switch (args.kind) {
      case Activation::kGelu:
        launch_kernel<T, GeluGate, false>(args, backward, s);
        break;
      case Activation::kGeluTanh:
        launch_kernel<T, GeluTanhGate, false>(args, backward, s);
        break;
      case Activation::kRelu:
        launch_kernel<T, ReluGate, false>(args, backward, s);
        break;
      case Activation::kSquaredRelu:
        launch_kernel<T, SquaredReluGate, false>(args, backward, s);
        break;
      case Activation::kSwiglu:
        launch_kernel<T, SiluGate, true>(args, backward, s);
        break;
      case Activation::kGeglu:
        launch_kernel<T, GeluTanhGate, true>(args, backward, s);
        break;
      case Activation::kQuickGeglu:
        launch_kernel<T, QuickGeluGate, true>(args, backward, s);
        break;
      case Activation::kExactGeglu:
        launch_kernel<T, GeluGate, true>(args, backward, s);
        break;
      case Activation::kQuickGelu:
        launch_kernel<T, QuickGeluGate, false>(args, backward, s);
        break;
    }
  });
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace

void activation_forward_cuda(const ActivationArgs& args, void* stream) { run(args, false, stream); }
void activation_backward_cuda(const ActivationArgs& args, void* stream) { run(args, true, stream); }

}  // namespace megatron
