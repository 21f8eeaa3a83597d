#include "megatron/kernels/rotary.h"

#include <complex>

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

constexpr int64_t kSequence = 5, kBatch = 2, kHeads = 3, kDim = 19, kHalf = 8;
// The input is a part of longer heads.
constexpr int64_t kRow = kDim + 5, kSkip = 2;

void test_rotary(DType dtype, bool interleaved, bool per_sample, double sign) {
  const int64_t angles = kSequence * (per_sample ? kBatch : 1) * kHalf;
  Doubles cosines, sines;
  for (const double angle : normal_values(angles, 2, 3.0)) {
    cosines.push_back(std::cos(angle));
    sines.push_back(std::sin(angle));
  }
  const Elements x(dtype, normal_values(kSequence * kBatch * kHeads * kRow, 1));
  const Elements cosine(wide(dtype), cosines), sine(wide(dtype), sines);
  Elements out(dtype, kSequence * kBatch * kHeads * kDim);
  Rotary rotary;
  rotary.dtype = dtype;
  rotary.sequence = kSequence;
  rotary.batch = kBatch;
  rotary.heads = kHeads;
  rotary.head_dim = kDim;
  rotary.half = kHalf;
  rotary.interleaved = interleaved;
  rotary.sign = sign;
  rotary.in = static_cast<const std::byte*>(x.data()) + kSkip * size_of(dtype);
  rotary.stride_n = kRow;
  rotary.stride_b = kHeads * kRow;
  rotary.stride_s = kBatch * kHeads * kRow;
  rotary.cos = cosine.data();
  rotary.sin = sine.data();
  rotary.angle_stride_b = per_sample ? kHalf : 0;
  rotary.angle_stride_s = per_sample ? kBatch * kHalf : kHalf;
  rotary.out = out.data();
  rotary.out_stride_n = kDim;
  rotary.out_stride_b = kHeads * kDim;
  rotary.out_stride_s = kBatch * kHeads * kDim;
  rotary_cpu(rotary, 0, 3);
  EXPECT_TRUE(std::isnan(out[3 * kHeads * kDim]));
  rotary_cpu(rotary, 3, kSequence * kBatch);

  // Each pair is a complex number, turned by the angle.
  Doubles expected;
  for (int64_t s = 0; s < kSequence; ++s) {
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t n = 0; n < kHeads; ++n) {
        const Doubles head =
            slice(x.values(), ((s * kBatch + b) * kHeads + n) * kRow + kSkip, kDim);
        Doubles turned = head;
        for (int64_t i = 0; i < kHalf; ++i) {
          const int64_t first = interleaved ? 2 * i : i,
                        second = interleaved ? 2 * i + 1 : i + kHalf;
          const int64_t angle = (per_sample ? s * kBatch + b : s) * kHalf + i;
          const std::complex<double> pair(head[first], head[second]),
              turn(cosines[angle], sign * sines[angle]);
          turned[first] = (pair * turn).real();
          turned[second] = (pair * turn).imag();
        }
        expected.insert(expected.end(), turned.begin(), turned.end());
      }
    }
  }
  expect_near(out, expected, tolerance(dtype), "out");

  // In place, the heads of a sample taken as a batch of their own: the same bits.
  Elements in_place = x;
  rotary.in = rotary.out = static_cast<std::byte*>(in_place.data()) + kSkip * size_of(dtype);
  rotary.batch = kBatch * kHeads;
  rotary.batch_per_angle = kHeads;
  rotary.heads = 1;
  rotary.stride_b = rotary.out_stride_b = kRow;
  rotary.out_stride_s = rotary.stride_s;
  rotary_cpu(rotary, 0, kSequence * rotary.batch);
  for (int64_t row = 0; row < kSequence * kBatch * kHeads; ++row) {
    EXPECT_EQ(slice(in_place.values(), row * kRow + kSkip, kDim),
              slice(out.values(), row * kDim, kDim));
    EXPECT_EQ(slice(in_place.values(), row * kRow, kSkip), slice(x.values(), row * kRow, kSkip));
  }
}

class RotaryKernel : public FloatingTypes {};

TEST_P(RotaryKernel, TurnsPairs) {
  for (const bool interleaved : {false, true}) {
    for (const bool per_sample : {false, true}) {
      test_rotary(GetParam(), interleaved, per_sample, 1.0);
      test_rotary(GetParam(), interleaved, per_sample, -1.0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RotaryKernel, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
