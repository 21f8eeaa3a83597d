#include "megatron/kernels/detail/block_io.h"

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

// Values between two neighbours of each narrow type, ties among them, at lengths with and without a
// vector's rest.
template <class Acc>
void test_rounding(DType dtype) {
  std::vector<Acc> run;
  for (int i = 0; i < 64; ++i) {
    for (const int bits : {8, 9, 11, 12}) {
      run.push_back(static_cast<Acc>(i % 2 == 0 ? 1 : -3) *
                    (1 + static_cast<Acc>(i) * static_cast<Acc>(std::ldexp(1.0, -bits))));
    }
  }
  run.push_back(std::numeric_limits<Acc>::infinity());
  run.push_back(static_cast<Acc>(-0.0));
  run.push_back(static_cast<Acc>(3e-7));  // subnormal in fp16
  const int64_t count = static_cast<int64_t>(run.size());
  Elements out(dtype, count + 1);
  store_run<Acc>(dtype, out.data(), 1, count, run.data());
  EXPECT_TRUE(std::isnan(out[0]));
  const Elements expected(dtype, Doubles(run.begin(), run.end()));
  for (int64_t i = 0; i < count; ++i)
    EXPECT_EQ(out[i + 1], expected[i]) << run[static_cast<size_t>(i)];

  std::vector<Acc> scratch(run.size());
  const Acc* back = load_run<Acc>(dtype, out.data(), 1, count, scratch.data());
  for (int64_t i = 0; i < count; ++i) EXPECT_EQ(back[i], static_cast<Acc>(expected[i]));

  const Acc nan = std::numeric_limits<Acc>::quiet_NaN();
  store_run<Acc>(dtype, out.data(), 1, 1, &nan);
  EXPECT_TRUE(std::isnan(out[1]));
}

class BlockIo : public FloatingTypes {};

TEST_P(BlockIo, RoundsToNearestEven) {
  test_rounding<double>(GetParam());
  if (GetParam() != DType::kFloat64) test_rounding<float>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Types, BlockIo, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
