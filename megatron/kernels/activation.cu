#include "megatron/kernels/activation.h"
#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {
namespace {

template <class T, class Gate>
__global__ void gated_kernel(ActivationArgs args, bool backward) {
  using Acc = AccumulateType<T>;
  const T* x = static_cast<const T*>(args.x);
  const T* dy = static_cast<const T*>(args.dy);
  T* out = static_cast<T*>(args.out);
  const Acc offset = static_cast<Acc>(args.offset);
  const int64_t f = args.features, total = args.rows * f, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t at = i / f * 2 * f + i % f;
    const GateValue<Acc> gate = Gate::at(load_as<Acc>(x[at]));
    const Acc up = load_as<Acc>(x[at + f]) + offset;
    if (backward) {
      const Acc grad = load_as<Acc>(dy[i]);
      store_as(out[at], grad * gate.slope * up);
      store_as(out[at + f], grad * gate.act);
    } else {
      store_as(out[i], gate.act * up);
    }
  }
}

template <class T, class Gate>
__global__ void plain_kernel(ActivationArgs args, bool backward) {
  using Acc = AccumulateType<T>;
  const T* x = static_cast<const T*>(args.x);
  const T* dy = static_cast<const T*>(args.dy);
  T* out = static_cast<T*>(args.out);
  const int64_t total = args.rows * args.features, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const GateValue<Acc> value = Gate::at(load_as<Acc>(x[i]));
    store_as(out[i], backward ? load_as<Acc>(dy[i]) * value.slope : value.act);
  }
}

void run(const ActivationArgs& args, bool backward, void* stream) {
  const unsigned blocks = blocks_for(args.rows * args.features);
  with_cuda_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const cudaStream_t s = as_stream(stream);
    switch (args.kind) {
      case ActivationKernel::kGelu:
        plain_kernel<T, GeluGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
      case ActivationKernel::kGeluTanh:
        plain_kernel<T, GeluTanhGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
      case ActivationKernel::kSquaredRelu:
        plain_kernel<T, SquaredReluGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
      case ActivationKernel::kSwiglu:
        gated_kernel<T, SiluGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
      case ActivationKernel::kGeglu:
        gated_kernel<T, GeluTanhGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
      case ActivationKernel::kQuickGeglu:
        gated_kernel<T, QuickGeluGate><<<blocks, kThreads, 0, s>>>(args, backward);
        break;
    }
  });
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace

void activation_forward_cuda(const ActivationArgs& args, void* stream) { run(args, false, stream); }
void activation_backward_cuda(const ActivationArgs& args, void* stream) { run(args, true, stream); }

}  // namespace megatron
