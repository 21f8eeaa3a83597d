// RMSNorm and LayerNorm over the rows of [rows, columns]. Acc is fp32, or fp64 for fp64 tensors.
//
//   LayerNorm  y = (x - mean) * rstd * g + b      rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   RMSNorm    y = x * rstd * g                   rstd = 1 / sqrt(mean(x^2) + eps)
//   with g = gain, or 1 + gain when zero_centered
//   backward   xhat = (x - mean) * rstd
//              dx = rstd * (g dy - mean(g dy) - xhat mean(g dy xhat)), RMSNorm without mean(g dy)
//              dg = sum over rows of dy xhat
//              db = sum over rows of dy
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

struct NormForward {
  bool layer_norm = true;  // else RMSNorm
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
  double eps = 1e-5;
  bool saved_statistics = false;  // read mean and rstd instead of computing them
  bool zero_centered = false;
  bool weights_as_x = false;   // gain and bias have dtype, not that of Acc
  const void* x = nullptr;     // [rows, columns]
  const void* gain = nullptr;  // [columns]
  const void* bias = nullptr;  // [columns] or null (RMSNorm)
  void* y = nullptr;           // [rows, columns], assigned; null: only statistics
  void* mean = nullptr;        // [rows] Acc; unused for RMSNorm
  void* rstd = nullptr;        // [rows] Acc
  float* amax = nullptr;       // [1] or null: raised to the largest |y|
};
void norm_forward_cpu(const NormForward& norm, int64_t row_begin, int64_t row_end);
void norm_forward_cuda(const NormForward& norm, void* stream);

// Rows per partial sum of the weight gradients: a function of the shape only, so that sums do not
// depend on threads.
constexpr int64_t kNormRowsPerBlock = 16;

struct NormBackward {
  bool layer_norm = true;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
  bool zero_centered = false;
  bool weights_as_x = false;  // gain has dtype, not that of Acc
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* gain = nullptr;  // [columns]
  const void* mean = nullptr;  // [rows] Acc; unused for RMSNorm
  const void* rstd = nullptr;  // [rows] Acc
  // [rows, columns] or null: added to dx: gradient of the residual path
  const void* residual_grad = nullptr;
  void* dx = nullptr;  // [rows, columns], assigned; may be residual_grad
  // [blocks, columns] Acc, assigned: partial sums of kNormRowsPerBlock rows each
  void* dgain = nullptr;
  void* dbias = nullptr;  // the same, or null
};
void norm_backward_cpu(const NormBackward& norm, int64_t block_begin, int64_t block_end);
void norm_backward_cuda(const NormBackward& norm, void* stream);

}  // namespace megatron
