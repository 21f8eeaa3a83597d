#include "megatron/kernels/fp8/fp8.h"

#include <algorithm>
#include <array>

#include "megatron/kernels/detail/fp8_math.h"
#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

// What a code stands for, from the definition of the formats.
double value_of(uint8_t code, Fp8Type type) {
  const int mantissa_bits = type == Fp8Type::kE4M3 ? 3 : 2, bias = type == Fp8Type::kE4M3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  double value =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  if (type == Fp8Type::kE4M3 ? (code & 0x7f) == 0x7f : exponent == 31) value = std::nan("");
  return (code & 0x80) != 0 ? -value : value;
}

template <Fp8Type Type>
void expect_nearest(float x) {
  const uint8_t code = fp8_code<Type>(x);
  const double value = value_of(code, Type),
               clamped = std::clamp<double>(x, -largest_of(Type), largest_of(Type));
  ASSERT_FALSE(std::isnan(value)) << x;
  EXPECT_EQ(std::signbit(value), std::signbit(x)) << x;
  for (const int step : {-1, 1}) {
    const int neighbour = (code & 0x7f) + step;
    if (neighbour < 0) continue;
    const double other = std::copysign(value_of(static_cast<uint8_t>(neighbour), Type), value);
    if (std::isnan(other)) continue;
    const double distance = std::abs(value - clamped), to_other = std::abs(other - clamped);
    EXPECT_LE(distance, to_other) << x;
    if (distance == to_other) {
      EXPECT_EQ(code % 2, 0) << x << " lies between two codes and goes to the even one";
    }
  }
}

template <Fp8Type Type>
void check_codes() {
  for (int code = 0; code < 256; ++code) {
    const double value = value_of(static_cast<uint8_t>(code), Type);
    if (std::isnan(value)) continue;
    EXPECT_EQ(fp8_code<Type>(static_cast<float>(value)), code);
    const double next = value_of(static_cast<uint8_t>(code + 1), Type);
    if (!std::isnan(next)) expect_nearest<Type>(static_cast<float>((value + next) / 2));
  }
  for (const double scale : {1e-6, 1e-3, 1.0, 300.0, 1e5})
    for (const double x : normal_values(2000, 7, scale))
      expect_nearest<Type>(static_cast<float>(x));
  EXPECT_EQ(fp8_code<Type>(std::numeric_limits<float>::quiet_NaN()), 0x7f);
  EXPECT_EQ(value_of(fp8_code<Type>(std::numeric_limits<float>::infinity()), Type),
            largest_of(Type))
      << "saturates";
  EXPECT_EQ(value_of(fp8_code<Type>(-1e30f), Type), -largest_of(Type));
}

TEST(Fp8, CodesAreTheNearest) {
  check_codes<Fp8Type::kE4M3>();
  check_codes<Fp8Type::kE5M2>();
}

TEST(Fp8, ScalesBringTheLargestValueToTheEnd) {
  EXPECT_EQ(fp8_scale(448.0f, 448.0f), 1.0f);
  EXPECT_EQ(fp8_scale(7.0f, 448.0f), 64.0f);
  for (const float amax :
       {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    EXPECT_EQ(fp8_scale(amax, 448.0f), 1.0f);
  EXPECT_EQ(fp8_scale(1e-45f, 448.0f), std::numeric_limits<float>::max()) << "not infinite";
  EXPECT_EQ(fp8_power_of_two_scale(6.9f, 448.0f), 64.0f);
  EXPECT_EQ(fp8_power_of_two_scale(7.1f, 448.0f), 32.0f) << "rounded down: nothing saturates";
  EXPECT_EQ(delayed_scale(0.0f, 448.0f, 1.0f, 3.0f), 3.0f);
  EXPECT_EQ(delayed_scale(0.0f, 448.0f, 1.0f, 0.0f), 1.0f);
  EXPECT_EQ(delayed_scale(std::numeric_limits<float>::infinity(), 448.0f, 1.0f, 3.0f), 3.0f);
  EXPECT_EQ(delayed_scale(7.0f, 448.0f, 0.25f, 3.0f), 16.0f);
}

TEST(Fp8, CastWritesRowsAndTheirTranspose) {
  constexpr int64_t kRows = 5, kColumns = 7;
  const Elements x(DType::kBFloat16, normal_values(kRows * kColumns, 3));
  double most = 0;
  for (const double value : x.values()) most = std::max(most, std::abs(value));
  float amax = 0, next = 0;
  amax_cpu({DType::kBFloat16, kRows * kColumns, x.data(), &amax}, 0, 1);
  EXPECT_EQ(amax, most);
  std::array<uint8_t, kRows * kColumns> rows{}, columns{};
  std::array<float, kFp8ScaleElements> scale{};
  Fp8Cast cast;
  cast.rows = kRows;
  cast.columns = kColumns;
  cast.x = x.data();
  cast.amax = &amax;
  cast.new_amax = &next;
  cast.scale = scale.data();
  cast.in_rows = rows.data();
  cast.in_columns = columns.data();
  fp8_cast_cpu(cast, 0, 2);
  fp8_cast_cpu(cast, 2, kRows);
  EXPECT_EQ(scale[0], 448.0f / amax);
  EXPECT_EQ(scale[kFp8InverseAt], 1.0f / scale[0]);
  EXPECT_EQ(next, most);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const auto value = static_cast<float>(x[r * kColumns + c]);
      EXPECT_EQ(rows[r * kColumns + c], fp8_code<Fp8Type::kE4M3>(value * scale[0]));
      EXPECT_EQ(columns[c * kRows + r], rows[r * kColumns + c]);
    }
  }
  const float zero = 0.0f;
  cast.amax = nullptr;
  cast.given_scale = &zero;
  fp8_cast_cpu(cast, 0, kRows);
  EXPECT_EQ(scale[0], 1.0f) << "a scale that nobody has set yet";
}

TEST(Fp8, BlocksHaveScalesOfTheirOwn) {
  constexpr int64_t kRows = 128, kColumns = 256;
  Doubles values = normal_values(kRows * kColumns, 4);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kColumns; ++c)
      values[r * kColumns + c] *= (c < 128 ? 1.0 : 100.0) * (1 + r) * (1 + c % 3);
  const Elements x(DType::kFloat32, values);
  std::vector<uint8_t> rows(kRows * kColumns), columns(kRows * kColumns);
  for (const bool square : {false, true}) {
    std::vector<float> row_scales(square ? 1 * 4 : 2 * kRows),
        column_scales(square ? 2 * 4 : 1 * kColumns);
    Fp8BlockCast cast;
    cast.dtype = DType::kFloat32;
    cast.square = square;
    cast.rows = kRows;
    cast.columns = kColumns;
    cast.x = x.data();
    cast.in_rows = rows.data();
    cast.in_columns = columns.data();
    cast.row_scales = row_scales.data();
    cast.column_scales = column_scales.data();
    fp8_block_cast_cpu(cast, 0, 1);
    for (const auto& [r, c] :
         {std::pair<int64_t, int64_t>{0, 0}, {17, 130}, {127, 255}, {64, 127}}) {
      double of_row = 0, of_column = 0, of_block = 0;
      for (int64_t i = 0; i < kRows; ++i) {
        of_column = std::max(of_column, std::abs(x[i * kColumns + c]));
        for (int64_t j = c / 128 * 128; j < c / 128 * 128 + 128; ++j) {
          if (i == r) of_row = std::max(of_row, std::abs(x[i * kColumns + j]));
          of_block = std::max(of_block, std::abs(x[i * kColumns + j]));
        }
      }
      const double by_row = std::exp2(std::floor(std::log2(448.0 / (square ? of_block : of_row))));
      const double by_column =
          std::exp2(std::floor(std::log2(448.0 / (square ? of_block : of_column))));
      EXPECT_EQ(row_scales[square ? c / 128 : c / 128 * kRows + r], 1 / by_row);
      EXPECT_EQ(column_scales[square ? c / 128 * 4 : c], 1 / by_column);
      const double value = x[r * kColumns + c];
      EXPECT_EQ(rows[r * kColumns + c],
                fp8_code<Fp8Type::kE4M3>(static_cast<float>(value * by_row)));
      EXPECT_EQ(columns[c * kRows + r],
                fp8_code<Fp8Type::kE4M3>(static_cast<float>(value * by_column)));
    }
  }
}

TEST(Fp8, DelayedScalesFollowTheHistory) {
  constexpr int64_t kHistory = 3;
  std::array<float, 3 * (1 + kHistory)> state{};
  std::array<float, 3> amax{};
  DelayedScaleUpdate update;
  update.slots = 3;
  update.history_length = kHistory;
  update.most_recent = false;
  update.state = state.data();
  update.amax = amax.data();
  const float steps[][3] = {{7, 14, 7}, {14, 0, 56}, {1, 0, 1}, {1, 0, 1}};
  const float largest[][3] = {{7, 14, 7}, {14, 14, 56}, {14, 14, 56}, {14, 14, 56}};
  for (int step = 0; step < 4; ++step) {
    std::copy(steps[step], steps[step] + 3, amax.begin());
    delayed_scale_update_cpu(update);
    for (int slot = 0; slot < 3; ++slot) {
      const float* s = state.data() + slot * (1 + kHistory);
      EXPECT_EQ(s[0], (slot == 2 ? 57344.0f : 448.0f) / largest[step][slot]) << step << " " << slot;
      EXPECT_EQ(s[1], steps[step][slot]);
      EXPECT_EQ(amax[slot], 0.0f);
    }
  }
  EXPECT_EQ(state[1 + kHistory], 32.0f) << "a history of zeros keeps the scale";
}

}  // namespace
}  // namespace megatron
