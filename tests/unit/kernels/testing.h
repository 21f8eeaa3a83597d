// For references of the kernel tests: arrays of any floating-point type seen as doubles, and
// derivatives by finite differences. The conversions share no code with the kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "megatron/base/dtype.h"

namespace megatron {

using Doubles = std::vector<double>;

// Round to nearest, ties to even.
inline uint16_t bfloat16_bits(double value) {
  const auto widened = [](uint32_t high) {
    return static_cast<double>(std::bit_cast<float>(high << 16));
  };
  const uint32_t down = std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16;
  if (std::isnan(value) || widened(down) == value) return static_cast<uint16_t>(down);
  const double below = std::abs(value - widened(down)), above = std::abs(value - widened(down + 1));
  return static_cast<uint16_t>(above < below || (above == below && down % 2 == 1) ? down + 1
                                                                                  : down);
}

class Elements {
 public:
  // All elements NaN, so that one that is not written is noticed.
  Elements(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count * size_of(dtype)), std::byte{0xff}) {}
  Elements(DType dtype, const Doubles& values)
      : Elements(dtype, static_cast<int64_t>(values.size())) {
    for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
  }

  DType dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  // An element after rounding to the type.
  double operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kFloat64:
        return read<double>(i);
      case DType::kFloat32:
        return read<float>(i);
      case DType::kFloat16:
        return static_cast<double>(read<_Float16>(i));
      default:
        return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(i)) << 16);
    }
  }
  Doubles values() const {
    Doubles out(bytes_.size() / static_cast<size_t>(size_of(dtype_)));
    for (size_t i = 0; i < out.size(); ++i) out[i] = (*this)[static_cast<int64_t>(i)];
    return out;
  }

 private:
  template <class T>
  T read(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T>
  void write(int64_t i, T value) {
    std::memcpy(bytes_.data() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
  void set(int64_t i, double value) {
    switch (dtype_) {
      case DType::kFloat64:
        return write(i, value);
      case DType::kFloat32:
        return write(i, static_cast<float>(value));
      case DType::kFloat16:
        return write(i, static_cast<_Float16>(value));
      default:
        return write(i, bfloat16_bits(value));
    }
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

// The type of statistics for `dtype`.
inline DType wide(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline Doubles normal_values(int64_t count, unsigned seed, double scale = 1.0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, scale);
  Doubles values(static_cast<size_t>(count));
  for (double& value : values) value = normal(random);
  return values;
}

// d f / d x[i] by central differences; f takes all of x. Accurate to about 1e-9.
template <class F>
Doubles differences(Doubles x, const F& f) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = f(x);
    x[i] = at - kStep;
    gradient[i] = (above - f(x)) / (2 * kStep);
    x[i] = at;
  }
  return gradient;
}

// Tolerance for one rounding to the type and sums of a few hundred terms in fp32.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat32:
      return 3e-6;
    case DType::kFloat16:
      return 1e-3;
    default:
      return 8e-3;
  }
}
// The same for comparisons with finite differences.
inline double gradient_tolerance(DType dtype) {
  return dtype == DType::kFloat64 ? 1e-8 : tolerance(dtype);
}

// Expects differences of at most `allowed` * max(1, largest expected value).
inline void expect_near(const Elements& got, const Doubles& expected, double allowed,
                        const std::string& what) {
  const Doubles values = got.values();
  ASSERT_EQ(values.size(), expected.size()) << what;
  double largest = 1.0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_FALSE(std::isnan(values[i])) << what << ": element " << i << " is NaN";
    ASSERT_LE(std::abs(values[i] - expected[i]), allowed * largest)
        << what << ": element " << i << " is " << values[i] << ", expected " << expected[i];
  }
}

inline Doubles slice(const Doubles& values, int64_t begin, int64_t count) {
  return Doubles(values.begin() + begin, values.begin() + begin + count);
}

// Tests over the four floating types.
class FloatingTypes : public ::testing::TestWithParam<DType> {};
inline const auto kFloatingTypes =
    ::testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16);
inline std::string type_name(const ::testing::TestParamInfo<DType>& info) {
  return std::string(to_string(info.param));
}

}  // namespace megatron
