// Products of 8-bit integers by every path of this processor, which have the same bits.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/kernels/int8/int8_product.h"
#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

// Code times scale are the values.
struct Codes {
  std::vector<int> codes;
  std::vector<float> scales;
};
Codes rounded(const Doubles& values, int64_t rows, int64_t inner) {
  Codes out;
  for (int64_t r = 0; r < rows; ++r) {
    float most = 0.0f;
    for (int64_t i = 0; i < inner; ++i)
      most = std::max(most, std::abs(static_cast<float>(values[r * inner + i])));
    const float scale = most / 127.0f;
    out.scales.push_back(scale);
    for (int64_t i = 0; i < inner; ++i) {
      const float x = static_cast<float>(values[r * inner + i]);
      out.codes.push_back(scale > 0 ? static_cast<int>(std::nearbyint(x * (1.0f / scale))) : 0);
    }
  }
  return out;
}

struct Weights {
  Weights(const Elements& w, int64_t outputs, int64_t inner)
      : memory(int8_panels(outputs) * int8_panel_bytes(inner) / kLine + 1), scales(outputs) {
    const Int8Weights args{w.dtype(), outputs, inner, w.data(), panels(), scales.data()};
    int8_weights_cpu(args, 1, int8_panels(outputs));
    int8_weights_cpu(args, 0, 1);
  }
  static constexpr int64_t kLine = 64;
  struct alignas(64) Line {
    int8_t codes[kLine];
  };
  int8_t* panels() { return memory.data()->codes; }
  std::vector<Line> memory;
  std::vector<float> scales;
};

struct Rows {
  Rows(const Elements& x, int64_t rows, int64_t inner)
      : codes(rows * int8_inner(inner)), scales(rows) {
    int8_rows_cpu({x.dtype(), rows, inner, x.data(), codes.data(), scales.data()}, 0, rows);
  }
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// Results of every path against exact sums.
void expect_exact(DType dtype, int64_t rows, int64_t outputs, int64_t inner) {
  const Elements x(dtype, normal_values(rows * inner, 1)),
      w(dtype, normal_values(outputs * inner, 2)), bias(DType::kFloat32, normal_values(outputs, 3)),
      addend(DType::kFloat32, normal_values(rows * outputs, 4));
  const Codes own = rounded(x.values(), rows, inner), theirs = rounded(w.values(), outputs, inner);
  Weights weights(w, outputs, inner);
  Rows row_codes(x, rows, inner);
  Int8Product args;
  args.rows = rows;
  args.outputs = outputs;
  args.inner = inner;
  args.x = row_codes.codes.data();
  args.x_scales = row_codes.scales.data();
  args.panels = weights.panels();
  args.scales = weights.scales.data();
  args.bias = static_cast<const float*>(bias.data());
  args.addend = static_cast<const float*>(addend.data());
  std::vector<float> expected;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < outputs; ++n) {
      const int64_t sum =
          std::inner_product(own.codes.begin() + r * inner, own.codes.begin() + (r + 1) * inner,
                             theirs.codes.begin() + n * inner, int64_t{0});
      expected.push_back(
          std::fma(static_cast<float>(sum), own.scales[r] * theirs.scales[n], args.bias[n]) +
          args.addend[r * outputs + n]);
    }
  std::vector<Weights::Line> memory(rows * outputs * sizeof(float) / sizeof(Weights::Line) + 1);
  args.y = reinterpret_cast<float*>(memory.data());
  for (const Int8Path path : int8_paths()) {
    std::fill_n(args.y, rows * outputs, NAN);
    args.path = path;
    int8_product_cpu(args, 0, 1);
    int8_product_cpu(args, 1, int8_panels(outputs));
    const auto [found, wanted] = std::mismatch(args.y, args.y + rows * outputs, expected.begin());
    if (wanted == expected.end()) continue;
    const int64_t at = found - args.y;
    ADD_FAILURE() << "path " << static_cast<int>(path) << ", " << inner << " inputs, row "
                  << at / outputs << " of " << rows << ", output " << at % outputs << ": " << *found
                  << " in place of " << *wanted;
  }
}

class Int8Kernels : public testing::TestWithParam<DType> {};

TEST_P(Int8Kernels, EveryPathGivesTheExactSums) {
  for (const int64_t inner : {64, 65, 200})
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 32, 40, 67})
      expect_exact(GetParam(), rows, 53, inner);
  expect_exact(GetParam(), 40, 53, 1600);    // inputs in several stretches
  expect_exact(GetParam(), 1040, 1024, 33);  // sums of several groups of rows, streamed results
}

TEST_P(Int8Kernels, RowsOfZerosStayZerosAndInvalidOnesInvalid) {
  constexpr int64_t kInner = 70, kRows = 3;
  Doubles values = normal_values(kRows * kInner, 1);
  std::fill_n(values.begin(), kInner, 0.0);
  values[2 * kInner + 68] = std::numeric_limits<double>::infinity();
  const Elements x(GetParam(), values), w(GetParam(), normal_values(kInner, 2));
  Weights weights(w, 1, kInner);
  Rows rows(x, kRows, kInner);
  for (const Int8Path path : int8_paths()) {
    std::vector<float> y(kRows, 7.0f);
    Int8Product args;
    args.rows = kRows;
    args.outputs = 1;
    args.inner = kInner;
    args.x = rows.codes.data();
    args.x_scales = rows.scales.data();
    args.panels = weights.panels();
    args.scales = weights.scales.data();
    args.y = y.data();
    args.path = path;
    int8_product_cpu(args, 0, 1);
    EXPECT_EQ(y[0], 0.0f);
    EXPECT_TRUE(std::isfinite(y[1]) && y[1] != 0.0f) << y[1];
    EXPECT_TRUE(std::isnan(y[2])) << y[2];
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Int8Kernels,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16));

}  // namespace
}  // namespace megatron
