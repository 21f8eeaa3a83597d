#include "megatron/kernels/column_sum.h"

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

class ColumnSumKernels : public FloatingTypes {};

TEST_P(ColumnSumKernels, SumsBlocksOfRows) {
  constexpr int64_t kRows = 2 * kColumnSumRows + 5, kColumns = 21, kBlocks = 3;
  const Elements x(GetParam(), normal_values(kRows * kColumns, 1));
  Elements partial(wide(GetParam()), kBlocks * kColumns);
  ColumnSum sum;
  sum.dtype = GetParam();
  sum.rows = kRows;
  sum.columns = kColumns;
  sum.x = x.data();
  sum.partial = partial.data();
  column_sum_cpu(sum, 0, 1);
  EXPECT_TRUE(std::isnan(partial[kColumns]));
  column_sum_cpu(sum, 1, kBlocks);
  Doubles expected(kBlocks * kColumns, 0.0);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < kColumns; ++i) {
      expected[row / kColumnSumRows * kColumns + i] += x[row * kColumns + i];
    }
  }
  expect_near(partial, expected, tolerance(wide(GetParam())), "partial");
}

// target = beta target + the sum of the blocks; the type is that of the target.
TEST_P(ColumnSumKernels, AddsBlocksToATarget) {
  constexpr int64_t kBlocks = 3, kColumns = 530;  // longer than one run of the kernel
  const Elements partial(wide(GetParam()), normal_values(kBlocks * kColumns, 1));
  for (const double beta : {0.0, 1.0, 0.5}) {
    // beta = 0 ignores what the target held, even NaN.
    Elements target = beta == 0 ? Elements(GetParam(), kColumns)
                                : Elements(GetParam(), normal_values(kColumns, 2));
    Doubles expected = beta == 0 ? Doubles(kColumns, 0.0) : target.values();
    const double last = target.values().back();
    for (int64_t i = 0; i < kColumns; ++i) {
      expected[i] *= beta;
      for (int64_t block = 0; block < kBlocks; ++block)
        expected[i] += partial[block * kColumns + i];
    }
    PartialSum sum;
    sum.dtype = wide(GetParam());
    sum.target_dtype = GetParam();
    sum.blocks = kBlocks;
    sum.columns = kColumns;
    sum.partial = partial.data();
    sum.beta = beta;
    sum.target = target.data();
    partial_sum_cpu(sum, 0, 300);
    EXPECT_TRUE(target.values().back() == last || beta == 0);
    partial_sum_cpu(sum, 300, kColumns);
    expect_near(target, expected, tolerance(GetParam()), "target");
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ColumnSumKernels, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
