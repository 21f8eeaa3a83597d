// Rotary position embedding. For each pair (a, b) of a head, with its angle's cosine c and sine s:
//
//   a' = a c - b s,  b' = b c + a s
//
// The backward rotates by the opposite angle: sign = -1.
//
// Pairs are (i, i + r), or (2 i, 2 i + 1) when interleaved, i < r; features from 2 r on are copied.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

struct Rotary {
  DType dtype = DType::kFloat32;
  int64_t sequence = 0, batch = 0, heads = 0, head_dim = 0;
  int64_t half = 0;  // r
  bool interleaved = false;
  double sign = 1.0;
  const void* in = nullptr;  // [s, b, n, d]; strides in elements, the last dimension is contiguous
  int64_t stride_s = 0, stride_b = 0, stride_n = 0;
  const void* cos = nullptr;  // [s, r] or [s, b, r], fp32 (fp64 for fp64 tensors)
  const void* sin = nullptr;
  int64_t angle_stride_s = 0, angle_stride_b = 0;  // 0 if the batch shares its angles
  int64_t batch_per_angle = 1;  // consecutive batch entries that share one sample's angles
  void* out = nullptr;          // [s, b, n, d], assigned; may be `in` with the same strides
  int64_t out_stride_s = 0, out_stride_b = 0, out_stride_n = 0;
};
void rotary_cpu(const Rotary& rotary, int64_t row_begin, int64_t row_end);  // rows of [s * b]
void rotary_cuda(const Rotary& rotary, void* stream);

}  // namespace megatron
