// Gradient norm and fused parameter updates over flat buffers.
//
// All arrays of one optimizer share their offsets: element i of gradient, master weight, moments
// and value belong together. Work is split into blocks that never cross a parameter; results depend
// neither on the number of threads nor on the order in which blocks run.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"
#include "megatron/kernels/step_control.h"

namespace megatron {

inline constexpr int64_t kUpdateBlockElements = 4096;

// A range of elements of one parameter.
struct UpdateBlock {
  int64_t begin = 0;  // element offset in the flat buffers
  int32_t count = 0;  // at most kUpdateBlockElements
  int32_t lr_group = 0;
  float weight_decay_mult = 0.0f;
  int32_t counts_in_norm = 1;  // 0: another rank counts these elements
  // For bf16 states: index of the first element in the flattened global tensor (the others follow
  // it), and the key of the parameter's random numbers.
  int64_t first_place = 0;
  uint64_t key = 0;
  double lr_factor = 1.0;  // times StepState::lr
};

// The flat buffers. `element` is the type of the gradient (kFloat32 or kFloat64) and of master
// weights and moments, each of which may be kBFloat16 instead of kFloat32. `value` has
// `value_type`, or is null if the master weight is the value.
struct UpdateBuffers {
  DType element = DType::kFloat32;
  DType value_type = DType::kFloat32;
  DType master_type = DType::kFloat32;
  DType exp_avg_type = DType::kFloat32;
  DType exp_avg_sq_type = DType::kFloat32;
  const void* grad = nullptr;
  void* master = nullptr;
  void* exp_avg = nullptr;     // AdamW's first moment; SGD's momentum buffer
  void* exp_avg_sq = nullptr;  // AdamW's second moment; null for SGD
  void* value = nullptr;
};

// Whether any state is bf16, so that the update must convert and round.
inline bool has_narrow_states(const UpdateBuffers& buffers) {
  return buffers.master_type == DType::kBFloat16 || buffers.exp_avg_type == DType::kBFloat16 ||
         buffers.exp_avg_sq_type == DType::kBFloat16;
}

struct AdamWConstants {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

// Sum of squares of one block's gradient, in double.
double block_sum_of_squares_cpu(const UpdateBuffers& buffers, const UpdateBlock& block);

// AdamW with decoupled decay and bias correction, t = state.adam_steps, g = grad * grad_factor:
//   p -= lr * wd * p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps);  value = p
// Does nothing if state.skip. Moves 28 bytes per element in fp32, 30 with bf16 values.
//
// bf16 states are computed in fp32 and rounded stochastically with the exact mean, so that changes
// below the spacing of bf16 are not lost. The random numbers of an element are words 0 (master), 1
// (exp_avg) and 2 (exp_avg_sq) of the Philox block at counter (position low, position high, t low,
// t high): independent of the layout. With all states in bf16: 16 bytes per element. Source:
// Loshchilov and Hutter 2019 (arXiv:1711.05101).
void adamw_block_cpu(const UpdateBuffers& buffers, const UpdateBlock& block, const StepState& state,
                     const AdamWConstants& constants);

// SGD with momentum and coupled weight decay, like torch.optim.SGD: g += wd * p; b = momentum * b +
// g; p -= lr * b; value = p.
void sgd_block_cpu(const UpdateBuffers& buffers, const UpdateBlock& block, const StepState& state,
                   double momentum);

#if defined(MEGATRON_CUDA)
// The same on a device; pointers are device memory, `stream` is a cudaStream_t. `partials` holds
// num_blocks doubles; `sum` one double, assigned. Deterministic.
void sum_of_squares_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks,
                         int64_t num_blocks, double* partials, double* sum, void* stream);
// One thread: runs step_control() on the record. `total_weight` and `sum_of_squares` are device
// memory.
void step_control_cuda(StepState* state, const ParameterSchedule& schedule, const StepRules& rules,
                       const double* sum_of_squares, const double* total_weight, int64_t samples,
                       void* stream);
void adamw_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
                const StepState* state, const AdamWConstants& constants, void* stream);
void sgd_cuda(const UpdateBuffers& buffers, const UpdateBlock* blocks, int64_t num_blocks,
              const StepState* state, double momentum, void* stream);
#endif

}  // namespace megatron
