// The update kernels against the formulas in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "megatron/kernels/adamw.h"

namespace megatron {
namespace {

constexpr int kCount = 1003;  // not a multiple of any vector length
constexpr int kBegin = 64;
constexpr int kTotal = kBegin + kCount + 37;

template <class T>
struct Buffers {
  std::vector<T> grad, master, exp_avg, exp_avg_sq;
  std::vector<uint16_t> value;

  explicit Buffers(unsigned seed) : value(kTotal, 0x1234) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, 1.0);
    for (int i = 0; i < kTotal; ++i) {
      grad.push_back(static_cast<T>(normal(random)));
      master.push_back(static_cast<T>(normal(random)));
      exp_avg.push_back(static_cast<T>(0.1 * normal(random)));
      exp_avg_sq.push_back(static_cast<T>(0.01 * std::fabs(normal(random))));
    }
  }

  UpdateBuffers pointers(DType value_type) {
    UpdateBuffers buffers;
    buffers.element = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    buffers.grad = grad.data();
    buffers.master = master.data();
    buffers.exp_avg = exp_avg.data();
    buffers.exp_avg_sq = exp_avg_sq.data();
    buffers.value_type = value_type;
    if (value_type == DType::kBFloat16 || value_type == DType::kFloat16)
      buffers.value = value.data();
    return buffers;
  }
};

UpdateBlock test_block() {
  UpdateBlock block;
  block.begin = kBegin;
  block.count = kCount;
  block.lr_group = 1;
  block.lr_factor = 0.25;
  block.weight_decay_mult = 1.0f;
  return block;
}

StepState test_state() {
  StepState state;
  state.adam_steps = 7;
  state.grad_factor = 0.37;
  state.weight_decay = 0.1;
  state.lr[0] = 1.0;
  state.lr[1] = 12e-3;  // 3e-3 with the block's factor
  return state;
}

template <class T>
void check_adamw(double tolerance) {
  Buffers<T> buffers(1), before = buffers;
  adamw_block_cpu(buffers.pointers(DType::kFloat64), test_block(), test_state(), {0.9, 0.95, 1e-8});
  const double lr = 3e-3, wd = 0.1, b1 = 0.9, b2 = 0.95;
  for (int i = 0; i < kTotal; ++i) {
    if (i < kBegin || i >= kBegin + kCount) {
      EXPECT_EQ(buffers.master[i], before.master[i]) << "outside the block";
      EXPECT_EQ(buffers.exp_avg[i], before.exp_avg[i]);
      continue;
    }
    const double g = before.grad[i] * 0.37;
    const double m = b1 * before.exp_avg[i] + (1 - b1) * g;
    const double v = b2 * before.exp_avg_sq[i] + (1 - b2) * g * g;
    const double m_hat = m / (1 - std::pow(b1, 7)), v_hat = v / (1 - std::pow(b2, 7));
    const double p =
        before.master[i] - lr * wd * before.master[i] - lr * m_hat / (std::sqrt(v_hat) + 1e-8);
    EXPECT_NEAR(buffers.exp_avg[i], m, tolerance);
    EXPECT_NEAR(buffers.exp_avg_sq[i], v, tolerance);
    EXPECT_NEAR(buffers.master[i], p, tolerance * 4);
  }
}

TEST(AdamW, MatchesTheFormula) {
  check_adamw<double>(1e-15);
  check_adamw<float>(2e-7);
}

TEST(Sgd, MatchesTheFormula) {
  Buffers<double> buffers(2), before = buffers;
  sgd_block_cpu(buffers.pointers(DType::kFloat64), test_block(), test_state(), 0.9);
  for (int i = kBegin; i < kBegin + kCount; ++i) {
    const double g = before.grad[i] * 0.37 + 0.1 * before.master[i];
    const double b = 0.9 * before.exp_avg[i] + g;
    EXPECT_NEAR(buffers.exp_avg[i], b, 1e-15);
    EXPECT_NEAR(buffers.master[i], before.master[i] - 3e-3 * b, 1e-15);
  }
  EXPECT_EQ(buffers.master[kBegin - 1], before.master[kBegin - 1]);
  EXPECT_EQ(buffers.master[kBegin + kCount], before.master[kBegin + kCount]);
}

TEST(AdamW, WithoutDecayAndGradientNothingMoves) {
  Buffers<float> buffers(3);
  std::fill(buffers.grad.begin(), buffers.grad.end(), 0.0f);
  std::fill(buffers.exp_avg.begin(), buffers.exp_avg.end(), 0.0f);
  std::fill(buffers.exp_avg_sq.begin(), buffers.exp_avg_sq.end(), 0.0f);
  const Buffers<float> before = buffers;
  UpdateBlock block = test_block();
  block.weight_decay_mult = 0.0f;
  adamw_block_cpu(buffers.pointers(DType::kFloat32), block, test_state(), {});
  EXPECT_EQ(buffers.master, before.master);
}

// Rounded to nearest even, by the definition: no other value of the type is nearer.
TEST(AdamW, StoresRoundedValues) {
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    Buffers<float> buffers(4);
    adamw_block_cpu(buffers.pointers(type), test_block(), test_state(), {});
    const auto decode = [&](uint16_t bits) {
      if (type == DType::kBFloat16) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof(value));
        return static_cast<double>(value);
      }
      const double mantissa = bits & 0x3ff;
      const int exponent = (bits >> 10) & 0x1f;
      const double value =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      return bits & 0x8000 ? -value : value;
    };
    for (int i = kBegin; i < kBegin + kCount; ++i) {
      const uint16_t bits = buffers.value[i];
      const double error = std::fabs(decode(bits) - buffers.master[i]);
      for (const int step : {-1, 1}) {
        const uint16_t other = static_cast<uint16_t>(bits + step);
        const double other_error = std::fabs(decode(other) - buffers.master[i]);
        EXPECT_TRUE(error < other_error || (error == other_error && bits % 2 == 0))
            << buffers.master[i];
      }
    }
    EXPECT_EQ(buffers.value[kBegin - 1], 0x1234);
    EXPECT_EQ(buffers.value[kBegin + kCount], 0x1234);
  }
}

// bf16 states: next to what fp32 states would be, right on the average, and a function of place and
// step alone.
TEST(AdamW, NarrowStatesAreRoundedByChance) {
  constexpr int kRuns = 400;
  Buffers<float> wide(8);
  std::vector<uint16_t> narrow[3];
  const auto to_bf16 = [](float x) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  };
  const auto to_float = [](uint16_t x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  };
  std::vector<float>* states[3] = {&wide.master, &wide.exp_avg, &wide.exp_avg_sq};
  for (int k = 0; k < 3; ++k) {
    for (float& x : *states[k]) {
      narrow[k].push_back(to_bf16(x));
      x = to_float(narrow[k].back());
    }
  }
  const auto update = [&](std::vector<uint16_t>(&to)[3], const StepState& state,
                          std::vector<int> cuts) {
    UpdateBuffers buffers = wide.pointers(DType::kFloat32);
    buffers.master = to[0].data(), buffers.exp_avg = to[1].data(),
    buffers.exp_avg_sq = to[2].data();
    buffers.master_type = buffers.exp_avg_type = buffers.exp_avg_sq_type = DType::kBFloat16;
    cuts.push_back(kCount);
    int done = 0;
    for (const int cut : cuts) {
      UpdateBlock block = test_block();
      block.key = 99;
      block.first_place = int64_t{1} << 33;
      block.first_place += done;
      block.begin += done;
      block.count = cut - done;
      adamw_block_cpu(buffers, block, state, {});
      done = cut;
    }
  };
  std::vector<double> sums[3];
  for (auto& sum : sums) sum.assign(kTotal, 0.0);
  StepState state = test_state();
  for (int run = 0; run < kRuns; ++run) {
    std::vector<uint16_t> once[3] = {narrow[0], narrow[1], narrow[2]},
                          again[3] = {narrow[0], narrow[1], narrow[2]};
    // Another key instead of another step, which would change the formula.
    UpdateBuffers buffers = wide.pointers(DType::kFloat32);
    buffers.master = once[0].data(), buffers.exp_avg = once[1].data(),
    buffers.exp_avg_sq = once[2].data();
    buffers.master_type = buffers.exp_avg_type = buffers.exp_avg_sq_type = DType::kBFloat16;
    UpdateBlock block = test_block();
    block.key = static_cast<uint64_t>(run);
    adamw_block_cpu(buffers, block, state, {});
    for (int k = 0; k < 3; ++k) {
      for (int i = 0; i < kTotal; ++i) sums[k][i] += to_float(once[k][i]);
    }
    if (run > 3) continue;
    std::vector<uint16_t> cut[3] = {narrow[0], narrow[1], narrow[2]};
    update(again, state, {});
    update(cut, state, {1, 7, 515, 516, 900});
    for (int k = 0; k < 3; ++k) EXPECT_EQ(again[k], cut[k]) << "cutting a block changes nothing";
    EXPECT_NE(again[0], once[0]) << "another key, other draws";
  }
  adamw_block_cpu(wide.pointers(DType::kFloat32), test_block(), state, {});
  for (int k = 0; k < 3; ++k) {
    double error = 0;
    for (int i = 0; i < kTotal; ++i) {
      const double exact = (*states[k])[i], mean = sums[k][i] / kRuns;
      EXPECT_NEAR(mean, exact, std::fabs(exact) / 128) << "one of the two neighbours";
      error += (mean - exact) / (std::fabs(exact) + 1e-30);
    }
    EXPECT_NEAR(error / kTotal, 0.0, 3e-5) << "no bias; rounding to nearest of one run has 1e-3";
  }
}

TEST(Update, ASkippedStepTouchesNothing) {
  Buffers<float> buffers(5), before = buffers;
  StepState state = test_state();
  state.skip = 1;
  adamw_block_cpu(buffers.pointers(DType::kBFloat16), test_block(), state, {});
  sgd_block_cpu(buffers.pointers(DType::kBFloat16), test_block(), state, 0.9);
  EXPECT_EQ(buffers.master, before.master);
  EXPECT_EQ(buffers.exp_avg, before.exp_avg);
  EXPECT_EQ(buffers.exp_avg_sq, before.exp_avg_sq);
  EXPECT_EQ(buffers.value, before.value);
}

TEST(SumOfSquares, CountsEveryElementOnceInDouble) {
  Buffers<float> buffers(6);
  buffers.grad[kBegin] = 3e30f;  // its square overflows fp32
  double expected = 0;
  for (int i = kBegin; i < kBegin + kCount; ++i) {
    expected += static_cast<double>(buffers.grad[i]) * buffers.grad[i];
  }
  UpdateBlock block = test_block();
  EXPECT_NEAR(block_sum_of_squares_cpu(buffers.pointers(DType::kFloat32), block), expected,
              expected * 1e-14);
  buffers.grad[kBegin] = 0;
  EXPECT_LT(block_sum_of_squares_cpu(buffers.pointers(DType::kFloat32), block), 2000.0);
  buffers.grad[kBegin + kCount - 1] = std::nanf("");
  EXPECT_TRUE(std::isnan(block_sum_of_squares_cpu(buffers.pointers(DType::kFloat32), block)));
  buffers.grad[kBegin + kCount - 1] = HUGE_VALF;
  EXPECT_TRUE(std::isinf(block_sum_of_squares_cpu(buffers.pointers(DType::kFloat32), block)));
  block.counts_in_norm = 0;
  EXPECT_EQ(block_sum_of_squares_cpu(buffers.pointers(DType::kFloat32), block), 0.0);

  Buffers<double> wide(7);
  double wide_expected = 0;
  for (int i = kBegin; i < kBegin + kCount; ++i) wide_expected += wide.grad[i] * wide.grad[i];
  EXPECT_NEAR(block_sum_of_squares_cpu(wide.pointers(DType::kFloat64), test_block()), wide_expected,
              wide_expected * 1e-14);
}

}  // namespace
}  // namespace megatron
