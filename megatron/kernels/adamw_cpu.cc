// The loops are plain so that the compiler can vectorise them; built with -O3 -fno-math-errno
// (CMakeLists.txt).
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "megatron/base/check.h"
#include "megatron/kernels/adamw.h"
#include "megatron/kernels/detail/stochastic_rounding.h"
#include "megatron/kernels/philox.h"

namespace megatron {
namespace {

// Partial sums of a block; their number fixes the order of additions.
constexpr int kLanes = 8;

template <class T>
double sum_of_squares(const T* grad, int count) {
  double lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double g = static_cast<double>(grad[i + lane]);
      lanes[lane] += g * g;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double g = static_cast<double>(grad[i]);
    lanes[lane] += g * g;
  }
  double sum = 0.0;
  for (double lane : lanes) sum += lane;
  return sum;
}

template <class T>
void adamw(const T* __restrict grad, T* __restrict master, T* __restrict exp_avg,
           T* __restrict exp_avg_sq, int count, const UpdateBlock& block, const StepState& state,
           const AdamWConstants& constants) {
  const double lr = state.lr[block.lr_group] * block.lr_factor;
  const double t = static_cast<double>(state.adam_steps);
  const double correction1 = 1.0 - std::pow(constants.beta1, t);
  const double correction2 = 1.0 - std::pow(constants.beta2, t);
  const T factor = static_cast<T>(state.grad_factor);
  const T keep = static_cast<T>(1.0 - lr * state.weight_decay * block.weight_decay_mult);
  const T beta1 = static_cast<T>(constants.beta1),
          one_minus_beta1 = static_cast<T>(1.0 - constants.beta1);
  const T beta2 = static_cast<T>(constants.beta2),
          one_minus_beta2 = static_cast<T>(1.0 - constants.beta2);
  const T inverse_root2 = static_cast<T>(1.0 / std::sqrt(correction2));
  const T eps = static_cast<T>(constants.eps);
  const T step_size = static_cast<T>(lr / correction1);
  for (int i = 0; i < count; ++i) {
    const T g = grad[i] * factor;
    const T m = beta1 * exp_avg[i] + one_minus_beta1 * g;
    const T v = beta2 * exp_avg_sq[i] + one_minus_beta2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = master[i] * keep - step_size * (m / (std::sqrt(v) * inverse_root2 + eps));
  }
}

template <class T>
void sgd(const T* __restrict grad, T* __restrict master, T* __restrict momentum_buffer, int count,
         const UpdateBlock& block, const StepState& state, double momentum) {
  const T factor = static_cast<T>(state.grad_factor);
  const T decay = static_cast<T>(state.weight_decay * block.weight_decay_mult);
  const T lr = static_cast<T>(state.lr[block.lr_group] * block.lr_factor);
  const T keep = static_cast<T>(momentum);
  for (int i = 0; i < count; ++i) {
    const T g = grad[i] * factor + decay * master[i];
    const T b = keep * momentum_buffer[i] + g;
    momentum_buffer[i] = b;
    master[i] -= lr * b;
  }
}

// Rounds to nearest even; a NaN stays NaN. Weights are never infinite.
void store_bfloat16(const float* source, uint16_t* target, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, source + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    target[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

void store_float16(const float* source, uint16_t* target, int count) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
  }
  for (; i < count; ++i)
    target[i] = static_cast<uint16_t>(_cvtss_sh(source[i], _MM_FROUND_TO_NEAREST_INT));
}

// value = master, unless they share memory.
void store_values(const UpdateBuffers& buffers, const UpdateBlock& block) {
  if (buffers.value == nullptr) return;
  MEGATRON_ASSERT(buffers.element == DType::kFloat32,
                  "values of another type need fp32 master weights");
  const float* master = static_cast<const float*>(buffers.master) + block.begin;
  switch (buffers.value_type) {
    case DType::kBFloat16:
      return store_bfloat16(master, static_cast<uint16_t*>(buffers.value) + block.begin,
                            block.count);
    case DType::kFloat16:
      return store_float16(master, static_cast<uint16_t*>(buffers.value) + block.begin,
                           block.count);
    default:
      break;
  }
  MEGATRON_ASSERT(false, "no store for values of type ", to_string(buffers.value_type));
}

// Elements of a state that are processed at once, converted to fp32 if they are bf16.
constexpr int kRun = 512;

struct Run {
  DType type;
  void* data;  // pointer to the first element
  float wide[kRun];

  float* open(DType state_type, void* state, int64_t first, int count) {
    type = state_type;
    if (type != DType::kBFloat16) {
      data = static_cast<float*>(state) + first;
      return static_cast<float*>(data);
    }
    data = static_cast<uint16_t*>(state) + first;
    const uint16_t* narrow = static_cast<const uint16_t*>(data);
    for (int i = 0; i < count; ++i)
      wide[i] = float_from_bits(static_cast<uint32_t>(narrow[i]) << 16);
    return wide;
  }
  // `words`: points to the first random word; one per element, four apart.
  void close(int count, const uint32_t* words) {
    if (type != DType::kBFloat16) return;
    uint16_t* narrow = static_cast<uint16_t*>(data);
    for (int i = 0; i < count; ++i) narrow[i] = round_by_chance(wide[i], words[4 * i]);
  }
};

void adamw_narrow(const UpdateBuffers& buffers, const UpdateBlock& block, const StepState& state,
                  const AdamWConstants& constants) {
  MEGATRON_ASSERT(buffers.element == DType::kFloat32, "narrow states need fp32 gradients");
  Run master, exp_avg, exp_avg_sq;
  uint32_t words[4 * kRun];
  const uint64_t step = static_cast<uint64_t>(state.adam_steps);
  for (int done = 0; done < block.count; done += kRun) {
    const int count = block.count - done < kRun ? block.count - done : kRun;
    const int64_t first = block.begin + done;
    philox_words_cpu(block.key, static_cast<uint64_t>(block.first_place + done),
                     static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), count, words);
    adamw(static_cast<const float*>(buffers.grad) + first,
          master.open(buffers.master_type, buffers.master, first, count),
          exp_avg.open(buffers.exp_avg_type, buffers.exp_avg, first, count),
          exp_avg_sq.open(buffers.exp_avg_sq_type, buffers.exp_avg_sq, first, count), count, block,
          state, constants);
    master.close(count, words);
    exp_avg.close(count, words + 1);
    exp_avg_sq.close(count, words + 2);
  }
}

template <class T>
T* at_block(const void* data, const UpdateBlock& block) {
  return static_cast<T*>(const_cast<void*>(data)) + block.begin;
}

}  // namespace

double block_sum_of_squares_cpu(const UpdateBuffers& buffers, const UpdateBlock& block) {
  if (block.counts_in_norm == 0) return 0.0;
  if (buffers.element == DType::kFloat64) {
    return sum_of_squares(at_block<const double>(buffers.grad, block), block.count);
  }
  return sum_of_squares(at_block<const float>(buffers.grad, block), block.count);
}

void adamw_block_cpu(const UpdateBuffers& buffers, const UpdateBlock& block, const StepState& state,
                     const AdamWConstants& constants) {
  if (state.skip != 0) return;
  if (has_narrow_states(buffers)) {
    adamw_narrow(buffers, block, state, constants);
  } else if (buffers.element == DType::kFloat64) {
    adamw(at_block<const double>(buffers.grad, block), at_block<double>(buffers.master, block),
          at_block<double>(buffers.exp_avg, block), at_block<double>(buffers.exp_avg_sq, block),
          block.count, block, state, constants);
  } else {
    adamw(at_block<const float>(buffers.grad, block), at_block<float>(buffers.master, block),
          at_block<float>(buffers.exp_avg, block), at_block<float>(buffers.exp_avg_sq, block),
          block.count, block, state, constants);
  }
  store_values(buffers, block);
}

void sgd_block_cpu(const UpdateBuffers& buffers, const UpdateBlock& block, const StepState& state,
                   double momentum) {
  if (state.skip != 0) return;
  if (buffers.element == DType::kFloat64) {
    sgd(at_block<const double>(buffers.grad, block), at_block<double>(buffers.master, block),
        at_block<double>(buffers.exp_avg, block), block.count, block, state, momentum);
  } else {
    sgd(at_block<const float>(buffers.grad, block), at_block<float>(buffers.master, block),
        at_block<float>(buffers.exp_avg, block), block.count, block, state, momentum);
  }
  store_values(buffers, block);
}

}  // namespace megatron
