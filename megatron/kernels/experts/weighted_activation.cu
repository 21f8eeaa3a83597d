#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/weighted_activation_math.h"
#include "megatron/kernels/experts/weighted_activation.h"

namespace megatron {
namespace {

// A block takes a row, the last one first (Note [Backwards]), a thread every blockDim.x-th group of
// its columns.
template <class T, class Gate, bool Gated, class Group>
__global__ void __launch_bounds__(kThreads) forward_kernel(WeightedActivationArgs args) {
  using Acc = AccumulateType<T>;
  const int64_t row = reverse_block(), f = args.features;
  const T* x = static_cast<const T*>(args.x) + row * (Gated ? 2 * f : f);
  T* y = static_cast<T*>(args.y) + row * f;
  const Acc weight = static_cast<const Acc*>(args.weights)[row];
  const Acc offset = static_cast<Acc>(args.offset), limit = static_cast<Acc>(args.limit);
  for (int64_t i = int64_t{threadIdx.x} * Group::kSize; i < f;
       i += int64_t{blockDim.x} * Group::kSize) {
    const Group in = load_group<Group>(x + i);
    Group ups, out;
    if constexpr (Gated) ups = load_group<Group>(x + f + i);
#pragma unroll
    for (int j = 0; j < Group::kSize; ++j) {
      const Acc value = load_as<Acc>(in.at[j]);
      if constexpr (Gated) {
        const Acc act = Gate::at(at_most(value, limit)).act;
        store_as(out.at[j], act * (within(load_as<Acc>(ups.at[j]), limit) + offset) * weight);
      } else {
        store_as(out.at[j], Gate::at(value).act * weight);
      }
    }
    store_group(y + i, out);
  }
}

template <class T, class Gate, bool Gated, class Group>
__global__ void __launch_bounds__(kThreads) backward_kernel(WeightedActivationArgs args) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  __shared__ float shared_amax[33];
  const int64_t row = reverse_block(), f = args.features, x_row = row * (Gated ? 2 * f : f);
  const T* x = static_cast<const T*>(args.x) + x_row;
  const T* dy = static_cast<const T*>(args.dy) + row * f;
  T* dx = static_cast<T*>(args.dx) + x_row;
  T* y = static_cast<T*>(args.y) + row * f;
  const Acc weight = static_cast<const Acc*>(args.weights)[row];
  const Acc offset = static_cast<Acc>(args.offset), limit = static_cast<Acc>(args.limit);
  Acc dweight = 0;
  float amax = 0.0f;
  for (int64_t i = int64_t{threadIdx.x} * Group::kSize; i < f;
       i += int64_t{blockDim.x} * Group::kSize) {
    const Group in = load_group<Group>(x + i), grads = load_group<Group>(dy + i);
    Group ups, dgates, dups, out;
    if constexpr (Gated) ups = load_group<Group>(x + f + i);
#pragma unroll
    for (int j = 0; j < Group::kSize; ++j) {
      const Acc value = load_as<Acc>(in.at[j]), dvalue = load_as<Acc>(grads.at[j]);
      const Acc grad = dvalue * weight;
      Acc act;
      if constexpr (Gated) {
        const auto element =
            gated_element<Gate>(value, load_as<Acc>(ups.at[j]), offset, limit, grad);
        act = element.act;
        store_as(dgates.at[j], element.dgate);
        store_as(dups.at[j], element.dup);
      } else {
        const GateValue<Acc> gate = Gate::at(value);
        act = gate.act;
        store_as(dgates.at[j], grad * gate.slope);
      }
      dweight += act * dvalue;
      store_as(out.at[j], act * weight);
    }
    store_group(dx + i, dgates);
    if constexpr (Gated) store_group(dx + f + i, dups);
    if (args.y != nullptr) store_group(y + i, out);
    if (args.dx_amax == nullptr) continue;
#pragma unroll
    for (int j = 0; j < Group::kSize; ++j) {
      amax = larger(amax, static_cast<float>(load_as<Acc>(dgates.at[j])));
      if constexpr (Gated) amax = larger(amax, static_cast<float>(load_as<Acc>(dups.at[j])));
    }
  }
  dweight = reduce_block(dweight, AddOp(), shared);
  if (threadIdx.x == 0) static_cast<Acc*>(args.dweights)[row] = dweight;
  if (args.dx_amax == nullptr) return;
  amax = reduce_block(amax, MaxOp(), shared_amax);
  if (threadIdx.x == 0) args.dx_amax[row] = amax;
}

// As many threads as divide a row evenly, in whole warps.
unsigned threads_for(int64_t groups) {
  const int64_t turns = (groups + kThreads - 1) / kThreads;
  return static_cast<unsigned>(((groups + turns - 1) / turns + 31) / 32 * 32);
}

template <class T, class Gate, bool Gated, class Group>
void launch_form(const WeightedActivationArgs& args, bool backward, cudaStream_t stream) {
  const auto kernel =
      backward ? backward_kernel<T, Gate, Gated, Group> : forward_kernel<T, Gate, Gated, Group>;
  kernel<<<static_cast<unsigned>(args.rows), threads_for(args.features / Group::kSize), 0,
           stream>>>(args);
}

template <class T, class Gate, bool Gated>
void launch_kernel(const WeightedActivationArgs& args, bool backward, cudaStream_t stream) {
  if (fits_packs<T>(args.features, {args.x, args.dy, args.y, args.dx})) {
    launch_form<T, Gate, Gated, Pack<T>>(args, backward, stream);
  } else {
    launch_form<T, Gate, Gated, Single<T>>(args, backward, stream);
  }
}

void run(const WeightedActivationArgs& args, bool backward, void* stream) {
  if (args.rows * args.features == 0) return;
  with_cuda_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const cudaStream_t s = as_stream(stream);
    switch (args.kind) {
      case Activation::kGelu:
        return launch_kernel<T, GeluGate, false>(args, backward, s);
      case Activation::kGeluTanh:
        return launch_kernel<T, GeluTanhGate, false>(args, backward, s);
      case Activation::kRelu:
        return launch_kernel<T, ReluGate, false>(args, backward, s);
      case Activation::kSquaredRelu:
        return launch_kernel<T, SquaredReluGate, false>(args, backward, s);
      case Activation::kSwiglu:
        return launch_kernel<T, SiluGate, true>(args, backward, s);
      case Activation::kGeglu:
        return launch_kernel<T, GeluTanhGate, true>(args, backward, s);
      case Activation::kQuickGeglu:
        return launch_kernel<T, QuickGeluGate, true>(args, backward, s);
      case Activation::kExactGeglu:
        return launch_kernel<T, GeluGate, true>(args, backward, s);
      case Activation::kQuickGelu:
        return launch_kernel<T, QuickGeluGate, false>(args, backward, s);
    }
  });
  check_cuda(cudaGetLastError(), "weighted activation");
}

}  // namespace

void weighted_activation_forward_cuda(const WeightedActivationArgs& args, void* stream) {
  run(args, /*backward=*/false, stream);
}
void weighted_activation_backward_cuda(const WeightedActivationArgs& args, void* stream) {
  run(args, /*backward=*/true, stream);
}

}  // namespace megatron
