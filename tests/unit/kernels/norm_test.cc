#include "megatron/kernels/norm.h"

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

constexpr double kEps = 1e-5;

struct Statistics {
  double mean, rstd;
};

Statistics statistics(bool layer_norm, const Doubles& x) {
  const double n = static_cast<double>(x.size());
  double mean = 0, square = 0;
  if (layer_norm) {
    for (const double value : x) mean += value / n;
  }
  for (const double value : x) square += (value - mean) * (value - mean) / n;
  return {mean, 1 / std::sqrt(square + kEps)};
}

Doubles normalised(bool layer_norm, const Doubles& x, const Doubles& gain, const Doubles& bias) {
  const auto [mean, rstd] = statistics(layer_norm, x);
  Doubles y(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    y[i] = (x[i] - mean) * rstd * gain[i] + (bias.empty() ? 0.0 : bias[i]);
  return y;
}

struct Shape {
  int64_t rows, columns;
};

void test_forward(DType dtype, bool layer_norm, bool with_bias, Shape shape) {
  const auto [rows, columns] = shape;
  const Elements x(dtype, normal_values(rows * columns, 1, 3.0)),
      gain(wide(dtype), normal_values(columns, 2));
  const Elements bias(wide(dtype), normal_values(columns, 3));
  Elements y(dtype, rows * columns), mean(wide(dtype), rows), rstd(wide(dtype), rows);
  NormForward norm;
  norm.layer_norm = layer_norm;
  norm.dtype = dtype;
  norm.rows = rows;
  norm.columns = columns;
  norm.eps = kEps;
  norm.x = x.data();
  norm.gain = gain.data();
  norm.bias = with_bias ? bias.data() : nullptr;
  norm.y = y.data();
  norm.mean = mean.data();
  norm.rstd = rstd.data();
  norm_forward_cpu(norm, 0, rows / 2);
  EXPECT_TRUE(std::isnan(y.values().back()));  // only the rows that were asked for
  norm_forward_cpu(norm, rows / 2, rows);

  Doubles expected, means, rstds;
  for (int64_t row = 0; row < rows; ++row) {
    const Doubles one = slice(x.values(), row * columns, columns);
    for (const double value :
         normalised(layer_norm, one, gain.values(), with_bias ? bias.values() : Doubles())) {
      expected.push_back(value);
    }
    means.push_back(statistics(layer_norm, one).mean);
    rstds.push_back(statistics(layer_norm, one).rstd);
  }
  expect_near(y, expected, tolerance(dtype), "y");
  if (layer_norm) expect_near(mean, means, tolerance(wide(dtype)), "mean");
  expect_near(rstd, rstds, tolerance(wide(dtype)), "rstd");

  // The output again from the saved statistics: the same bits.
  Elements again(dtype, rows * columns);
  norm.saved_statistics = true;
  norm.y = again.data();
  norm_forward_cpu(norm, 0, rows);
  EXPECT_EQ(again.bytes(), y.bytes());
}

// The gradients of sum(dy * y) by differences.
void test_backward(DType dtype, bool layer_norm, bool with_bias, Shape shape) {
  const auto [rows, columns] = shape;
  const int64_t blocks = (rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock;
  const Elements x(dtype, normal_values(rows * columns, 1, 3.0)),
      gain(wide(dtype), normal_values(columns, 2));
  const Elements dy(dtype, normal_values(rows * columns, 4));
  Doubles means, rstds, expected_dx, expected_dgain(blocks * columns),
      expected_dbias(blocks * columns);
  for (int64_t row = 0; row < rows; ++row) {
    const Doubles one = slice(x.values(), row * columns, columns),
                  up = slice(dy.values(), row * columns, columns);
    means.push_back(statistics(layer_norm, one).mean);
    rstds.push_back(statistics(layer_norm, one).rstd);
    const auto loss = [&](const Doubles& at, const Doubles& weight, const Doubles& shift) {
      const Doubles y = normalised(layer_norm, at, weight, shift);
      double sum = 0;
      for (size_t i = 0; i < y.size(); ++i) sum += up[i] * y[i];
      return sum;
    };
    const Doubles none(columns, 0.0), weight = gain.values();
    for (const double value :
         differences(one, [&](const Doubles& at) { return loss(at, weight, none); })) {
      expected_dx.push_back(value);
    }
    const Doubles dgain =
        differences(weight, [&](const Doubles& at) { return loss(one, at, none); });
    const Doubles dbias =
        differences(none, [&](const Doubles& at) { return loss(one, weight, at); });
    for (int64_t i = 0; i < columns; ++i) {
      expected_dgain[row / kNormRowsPerBlock * columns + i] += dgain[i];
      expected_dbias[row / kNormRowsPerBlock * columns + i] += dbias[i];
    }
  }
  const Elements mean(wide(dtype), means), rstd(wide(dtype), rstds);
  Elements dx(dtype, rows * columns), dgain(wide(dtype), blocks * columns),
      dbias(wide(dtype), blocks * columns);
  NormBackward norm;
  norm.layer_norm = layer_norm;
  norm.dtype = dtype;
  norm.rows = rows;
  norm.columns = columns;
  norm.dy = dy.data();
  norm.x = x.data();
  norm.gain = gain.data();
  norm.mean = mean.data();
  norm.rstd = rstd.data();
  norm.dx = dx.data();
  norm.dgain = dgain.data();
  norm.dbias = with_bias ? dbias.data() : nullptr;
  for (int64_t block = 0; block < blocks; ++block) norm_backward_cpu(norm, block, block + 1);

  expect_near(dx, expected_dx, gradient_tolerance(dtype), "dx");
  expect_near(dgain, expected_dgain, gradient_tolerance(wide(dtype)), "dgain");
  if (with_bias) {
    expect_near(dbias, expected_dbias, gradient_tolerance(wide(dtype)), "dbias");
  } else {
    EXPECT_TRUE(std::isnan(dbias[0]));
  }
}

class NormKernel : public FloatingTypes {};

TEST_P(NormKernel, Forward) {
  for (const bool layer_norm : {true, false}) {
    for (const Shape shape : {Shape{2, 1}, Shape{7, 37}, Shape{3, 600}}) {
      test_forward(GetParam(), layer_norm, true, shape);
      test_forward(GetParam(), layer_norm, false, shape);
    }
  }
}

TEST_P(NormKernel, Backward) {
  for (const bool layer_norm : {true, false}) {
    for (const Shape shape : {Shape{kNormRowsPerBlock + 6, 21}, Shape{2, 150}}) {
      test_backward(GetParam(), layer_norm, true, shape);
      test_backward(GetParam(), layer_norm, false, shape);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, NormKernel, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
