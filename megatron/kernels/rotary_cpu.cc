#include <vector>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/rotary.h"

namespace megatron {
namespace {

template <class Acc>
void rotate_head(const Rotary& rotary, const Acc* t, const Acc* cos, const Acc* sin, Acc* out) {
  const int64_t r = rotary.half;
  const Acc sign = static_cast<Acc>(rotary.sign);
  if (rotary.interleaved) {
    for (int64_t i = 0; i < r; ++i) {
      const Acc a = t[2 * i], b = t[2 * i + 1], s = sign * sin[i];
      out[2 * i] = a * cos[i] - b * s;
      out[2 * i + 1] = b * cos[i] + a * s;
    }
  } else {
    for (int64_t i = 0; i < r; ++i) {
      const Acc a = t[i], b = t[i + r], s = sign * sin[i];
      out[i] = a * cos[i] - b * s;
      out[i + r] = b * cos[i] + a * s;
    }
  }
  for (int64_t i = 2 * r; i < rotary.head_dim; ++i) out[i] = t[i];
}

template <class Acc>
void rotate_rows(const Rotary& rotary, int64_t begin, int64_t end) {
  const int64_t d = rotary.head_dim;
  std::vector<Acc> scratch(2 * d);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t s = row / rotary.batch, b = row % rotary.batch;
    const int64_t angle =
        s * rotary.angle_stride_s + b / rotary.batch_per_angle * rotary.angle_stride_b;
    const Acc* cos = static_cast<const Acc*>(rotary.cos) + angle;
    const Acc* sin = static_cast<const Acc*>(rotary.sin) + angle;
    for (int64_t head = 0; head < rotary.heads; ++head) {
      const int64_t from = s * rotary.stride_s + b * rotary.stride_b + head * rotary.stride_n;
      const int64_t to =
          s * rotary.out_stride_s + b * rotary.out_stride_b + head * rotary.out_stride_n;
      const Acc* t = load_run(rotary.dtype, rotary.in, from, d, scratch.data());
      Acc* out = output_run(rotary.dtype, rotary.out, to, scratch.data() + d);
      rotate_head(rotary, t, cos, sin, out);
      store_run(rotary.dtype, rotary.out, to, d, out);
    }
  }
}

}  // namespace

void rotary_cpu(const Rotary& rotary, int64_t row_begin, int64_t row_end) {
  with_accumulator(rotary.dtype,
                   [&](auto acc) { rotate_rows<decltype(acc)>(rotary, row_begin, row_end); });
}

}  // namespace megatron
