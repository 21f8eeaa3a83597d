#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "megatron/base/check.h"
#include "megatron/kernels/adamw.h"
#include "megatron/kernels/detail/philox_math.h"
#include "megatron/kernels/detail/stochastic_rounding.h"

namespace megatron {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  MEGATRON_CHECK(error == cudaSuccess, kernel, ": CUDA launch failed: ", cudaGetErrorName(error),
                 ": ", cudaGetErrorString(error));
}

// Sum over the threads of a block, in a fixed order; valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double warp_sums[kWarps];
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp];
  }
  return sum;
}

// One thread block per UpdateBlock.
template <class T>
__global__ void sum_of_squares_kernel(const T* grad, const UpdateBlock* blocks, double* partials) {
  const UpdateBlock block = blocks[blockIdx.x];
  double sum = 0.0;
  if (block.counts_in_norm != 0) {
    for (int i = threadIdx.x; i < block.count; i += kThreads) {
      const double g = static_cast<double>(grad[block.begin + i]);
      sum += g * g;
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// A single thread block.
__global__ void sum_partials_kernel(const double* partials, int64_t count, double* sum) {
  double mine = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) mine += partials[i];
  mine = block_sum(mine);
  if (threadIdx.x == 0) *sum = mine;
}

__global__ void step_control_kernel(StepState* state, ParameterSchedule schedule, StepRules rules,
                                    const double* sum_of_squares, const double* total_weight,
                                    int64_t samples) {
  const StepInputs inputs{*sum_of_squares, *total_weight, samples};
  step_control(*state, schedule, rules, inputs);
}

__device__ void store_value(float master, __nv_bfloat16* value) {
  *value = __float2bfloat16_rn(master);
}
__device__ void store_value(float master, __half* value) { *value = __float2half_rn(master); }
__device__ void store_value(float, float*) {}  // the master weight is the value
__device__ void store_value(double, double*) {}

// The factors of the update, computed from the record once per thread block, in double.
template <class T>
struct AdamWFactors {
  T factor, keep, inverse_root2, step_size;
};

template <class T>
__device__ AdamWFactors<T> adamw_factors(const StepState& state, const UpdateBlock& block,
                                         const AdamWConstants& constants) {
  const double lr = state.lr[block.lr_group] * block.lr_factor;
  const double t = static_cast<double>(state.adam_steps);
  const double correction1 = 1.0 - pow(constants.beta1, t);
  const double correction2 = 1.0 - pow(constants.beta2, t);
  return {static_cast<T>(state.grad_factor),
          static_cast<T>(1.0 - lr * state.weight_decay * block.weight_decay_mult),
          static_cast<T>(1.0 / sqrt(correction2)), static_cast<T>(lr / correction1)};
}

// The update of one element.
template <class T>
struct AdamW {
  AdamWFactors<T> f;
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;

  __device__ AdamW(const AdamWFactors<T>& factors, const AdamWConstants& constants)
      : f(factors),
        beta1(static_cast<T>(constants.beta1)),
        one_minus_beta1(static_cast<T>(1.0 - constants.beta1)),
        beta2(static_cast<T>(constants.beta2)),
        one_minus_beta2(static_cast<T>(1.0 - constants.beta2)),
        eps(static_cast<T>(constants.eps)) {}
  __device__ __forceinline__ void operator()(T grad, T& p, T& m, T& v) const {
    const T g = grad * f.factor;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
    p = p * f.keep - f.step_size * (m / (sqrt(v) * f.inverse_root2 + eps));
  }
};

// Four consecutive elements of the fp32 states, 16 bytes of each; not read again in this step.
struct StateQuad {
  float4 grad, master, exp_avg, exp_avg_sq;

  __device__ __forceinline__ void load(const float* g, const float* p, const float* m,
                                       const float* v, int64_t i) {
    grad = __ldcs(reinterpret_cast<const float4*>(g + i));
    master = __ldcs(reinterpret_cast<const float4*>(p + i));
    exp_avg = __ldcs(reinterpret_cast<const float4*>(m + i));
    exp_avg_sq = __ldcs(reinterpret_cast<const float4*>(v + i));
  }
  __device__ __forceinline__ void update(const AdamW<float>& adamw) {
    adamw(grad.x, master.x, exp_avg.x, exp_avg_sq.x);
    adamw(grad.y, master.y, exp_avg.y, exp_avg_sq.y);
    adamw(grad.z, master.z, exp_avg.z, exp_avg_sq.z);
    adamw(grad.w, master.w, exp_avg.w, exp_avg_sq.w);
  }
  template <class Value>
  __device__ __forceinline__ void store(float* p, float* m, float* v, Value* value,
                                        int64_t i) const {
    __stcs(reinterpret_cast<float4*>(p + i), master);
    __stcs(reinterpret_cast<float4*>(m + i), exp_avg);
    __stcs(reinterpret_cast<float4*>(v + i), exp_avg_sq);
    if constexpr (sizeof(Value) == 2) {
      Value four[4];
      store_value(master.x, four);
      store_value(master.y, four + 1);
      store_value(master.z, four + 2);
      store_value(master.w, four + 3);
      uint2 words;
      memcpy(&words, four, sizeof words);
      *reinterpret_cast<uint2*>(value + i) = words;
    }
  }
};

// `in_quads`: the arrays are aligned to 16 bytes (values to 8). The first loads are issued before
// the factors are known.
template <class T, class Value>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const T* __restrict__ grad, T* __restrict__ master, T* __restrict__ exp_avg,
                 T* __restrict__ exp_avg_sq, Value* __restrict__ value,
                 const UpdateBlock* __restrict__ blocks, const StepState* state,
                 AdamWConstants constants, bool in_quads) {
  if (state->skip != 0) return;
  const UpdateBlock block = blocks[blockIdx.x];
  __shared__ AdamWFactors<T> shared;
  int64_t done = 0;
  if constexpr (std::is_same_v<T, float>) {
    const int quads = in_quads && block.begin % 4 == 0 ? block.count / 4 : 0;
    done = 4 * int64_t{quads};
    int k = static_cast<int>(threadIdx.x);
    StateQuad quad, next;
    if (k < quads) quad.load(grad, master, exp_avg, exp_avg_sq, block.begin + 4 * k);
    if (threadIdx.x == 0) shared = adamw_factors<T>(*state, block, constants);
    __syncthreads();
    const AdamW<T> adamw(shared, constants);
    for (; k < quads; k += kThreads) {
      if (k + kThreads < quads)
        next.load(grad, master, exp_avg, exp_avg_sq, block.begin + 4 * (k + kThreads));
      quad.update(adamw);
      quad.store(master, exp_avg, exp_avg_sq, value, block.begin + 4 * k);
      quad = next;
    }
  } else {
    if (threadIdx.x == 0) shared = adamw_factors<T>(*state, block, constants);
    __syncthreads();
  }
  const AdamW<T> adamw(shared, constants);
  for (int64_t i = block.begin + done + threadIdx.x; i < block.begin + block.count; i += kThreads) {
    T p = master[i], m = exp_avg[i], v = exp_avg_sq[i];
    adamw(grad[i], p, m, v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = p;
    if (value != nullptr) store_value(p, value + i);
  }
}

__device__ float load_state(DType type, const void* state, int64_t i) {
  if (type == DType::kBFloat16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(state)[i]);
  return static_cast<const float*>(state)[i];
}

__device__ void store_state(DType type, void* state, int64_t i, float x, uint32_t word) {
  if (type == DType::kBFloat16) {
    static_cast<uint16_t*>(state)[i] = round_by_chance(x, word);
  } else {
    static_cast<float*>(state)[i] = x;
  }
}

// adamw_kernel for states of either type; the types are uniform over all threads.
__global__ void adamw_narrow_kernel(UpdateBuffers buffers, const UpdateBlock* __restrict__ blocks,
                                    const StepState* state, AdamWConstants constants) {
  if (state->skip != 0) return;
  const UpdateBlock block = blocks[blockIdx.x];
  __shared__ AdamWFactors<float> shared;
  if (threadIdx.x == 0) shared = adamw_factors<float>(*state, block, constants);
  __syncthreads();
  const AdamWFactors<float> f = shared;
  const float beta1 = static_cast<float>(constants.beta1),
              one_minus_beta1 = static_cast<float>(1.0 - constants.beta1);
  const float beta2 = static_cast<float>(constants.beta2),
              one_minus_beta2 = static_cast<float>(1.0 - constants.beta2);
  const float eps = static_cast<float>(constants.eps);
  const uint64_t step = static_cast<uint64_t>(state->adam_steps);
  const float* grad = static_cast<const float*>(buffers.grad);
  for (int64_t offset = threadIdx.x; offset < block.count; offset += kThreads) {
    const int64_t i = block.begin + offset;
    const uint64_t place = static_cast<uint64_t>(block.first_place + offset);
    uint32_t words[4] = {static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32),
                         static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)};
    philox_rounds(words[0], words[1], words[2], words[3], static_cast<uint32_t>(block.key),
                  static_cast<uint32_t>(block.key >> 32));
    const float g = grad[i] * f.factor;
    const float m =
        beta1 * load_state(buffers.exp_avg_type, buffers.exp_avg, i) + one_minus_beta1 * g;
    const float v = beta2 * load_state(buffers.exp_avg_sq_type, buffers.exp_avg_sq, i) +
                    one_minus_beta2 * (g * g);
    const float p = load_state(buffers.master_type, buffers.master, i) * f.keep -
                    f.step_size * (m / (sqrt(v) * f.inverse_root2 + eps));
    store_state(buffers.master_type, buffers.master, i, p, words[0]);
    store_state(buffers.exp_avg_type, buffers.exp_avg, i, m, words[1]);
    store_state(buffers.exp_avg_sq_type, buffers.exp_avg_sq, i, v, words[2]);
    if (buffers.value == nullptr) continue;
    if (buffers.value_type == DType::kBFloat16) {
      store_value(p, static_cast<__nv_bfloat16*>(buffers.value) + i);
    } else {
      store_value(p, static_cast<__half*>(buffers.value) + i);
    }
  }
}

template <class T, class Value>
__global__ void sgd_kernel(const T* __restrict__ grad, T* __restrict__ master,
                           T* __restrict__ momentum_buffer, Value* __restrict__ value,
                           const UpdateBlock* __restrict__ blocks, const StepState* state,
                           T momentum) {
  if (state->skip != 0) return;
  const UpdateBlock block = blocks[blockIdx.x];
  const T factor = static_cast<T>(state->grad_factor);
  const T decay = static_cast<T>(state->weight_decay * block.weight_decay_mult);
  const T lr = static_cast<T>(state->lr[block.lr_group] * block.lr_factor);
  for (int64_t i = block.begin + threadIdx.x; i < block.begin + block.count; i += kThreads) {
    const T g = grad[i] * factor + decay * master[i];
    const T b = momentum * momentum_buffer[i] + g;
    const T p = master[i] - lr * b;
    momentum_buffer[i] = b;
    master[i] = p;
    if (value != nullptr) store_value(p, value + i);
  }
}

template <class T, class Value>
void launch_adamw(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
                  const StepState* state, const AdamWConstants& constants, cudaStream_t stream) {
  const auto is_aligned = [](const void* pointer, uintptr_t to) {
    return reinterpret_cast<uintptr_t>(pointer) % to == 0;
  };
  const bool in_quads = is_aligned(buffers.grad, 16) && is_aligned(buffers.master, 16) &&
                        is_aligned(buffers.exp_avg, 16) && is_aligned(buffers.exp_avg_sq, 16) &&
                        is_aligned(buffers.value, 8);
  adamw_kernel<T, Value><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(buffers.grad), static_cast<T*>(buffers.master),
      static_cast<T*>(buffers.exp_avg), static_cast<T*>(buffers.exp_avg_sq),
      static_cast<Value*>(buffers.value), blocks, state, constants, in_quads);
  check_launch("adamw");
}

template <class T, class Value>
void launch_sgd(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
                const StepState* state, double momentum, cudaStream_t stream) {
  sgd_kernel<T, Value><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(buffers.grad), static_cast<T*>(buffers.master),
      static_cast<T*>(buffers.exp_avg), static_cast<Value*>(buffers.value), blocks, state,
      static_cast<T>(momentum));
  check_launch("sgd");
}

// The supported combinations of element and value type.
enum class Types { kDouble, kFloat, kFloatToBFloat16, kFloatToHalf };

Types types_of(const UpdateBuffers& buffers) {
  if (buffers.element == DType::kFloat64) return Types::kDouble;
  if (buffers.value == nullptr) return Types::kFloat;
  if (buffers.value_type == DType::kBFloat16) return Types::kFloatToBFloat16;
  MEGATRON_ASSERT(buffers.value_type == DType::kFloat16, "no store for values of type ",
                  to_string(buffers.value_type));
  return Types::kFloatToHalf;
}

}  // namespace

void sum_of_squares_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks,
                         int64_t num_blocks, double* partials, double* sum, void* stream) {
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (num_blocks > 0) {
    const unsigned grid = static_cast<unsigned>(num_blocks);
    if (buffers.element == DType::kFloat64) {
      sum_of_squares_kernel<<<grid, kThreads, 0, on>>>(static_cast<const double*>(buffers.grad),
                                                       blocks, partials);
    } else {
      sum_of_squares_kernel<<<grid, kThreads, 0, on>>>(static_cast<const float*>(buffers.grad),
                                                       blocks, partials);
    }
    check_launch("sum_of_squares");
  }
  sum_partials_kernel<<<1, kThreads, 0, on>>>(partials, num_blocks, sum);
  check_launch("sum_partials");
}

void step_control_cuda(StepState* state, const ParameterSchedule& schedule, const StepRules& rules,
                       const double* sum_of_squares, const double* total_weight, int64_t samples,
                       void* stream) {
  step_control_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      state, schedule, rules, sum_of_squares, total_weight, samples);
  check_launch("step_control");
}

void adamw_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
                const StepState* state, const AdamWConstants& constants, void* stream) {
  if (num_blocks == 0) return;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (has_narrow_states(buffers)) {
    MEGATRON_ASSERT(buffers.element == DType::kFloat32, "narrow states need fp32 gradients");
    adamw_narrow_kernel<<<static_cast<unsigned>(num_blocks), kThreads, 0, on>>>(buffers, blocks,
                                                                                state, constants);
    return check_launch("adamw with narrow states");
  }
  switch (types_of(buffers)) {
    case Types::kDouble:
      return launch_adamw<double, double>(buffers, blocks, num_blocks, state, constants, on);
    case Types::kFloat:
      return launch_adamw<float, float>(buffers, blocks, num_blocks, state, constants, on);
    case Types::kFloatToBFloat16:
      return launch_adamw<float, __nv_bfloat16>(buffers, blocks, num_blocks, state, constants, on);
    case Types::kFloatToHalf:
      return launch_adamw<float, __half>(buffers, blocks, num_blocks, state, constants, on);
  }
}

void sgd_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
              const StepState* state, double momentum, void* stream) {
  if (num_blocks == 0) return;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  switch (types_of(buffers)) {
    case Types::kDouble:
      return launch_sgd<double, double>(buffers, blocks, num_blocks, state, momentum, on);
    case Types::kFloat:
      return launch_sgd<float, float>(buffers, blocks, num_blocks, state, momentum, on);
    case Types::kFloatToBFloat16:
      return launch_sgd<float, __nv_bfloat16>(buffers, blocks, num_blocks, state, momentum, on);
    case Types::kFloatToHalf:
      return launch_sgd<float, __half>(buffers, blocks, num_blocks, state, momentum, on);
  }
}

}  // namespace megatron
