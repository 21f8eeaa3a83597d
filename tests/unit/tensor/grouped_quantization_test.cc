// FP8 products of experts against FP8 products of each expert's rows alone.
#include "megatron/tensor/experts/grouped_quantization.h"

#include <gtest/gtest.h>

#include <cmath>

#include "megatron/kernels/fp8/fp8.h"
#include "tests/unit/tensor/testing.h"

// A namespace of its own: sources of tests are compiled together.
namespace megatron::expert_fp8 {
namespace {

constexpr int64_t kN = 256, kK = 128, kBeyond = 4;
constexpr Orientations kBoth{true, true};

const std::vector<std::vector<int64_t>> kLoads = {{0, 5, 130, 0}, {33}, {0, 0}};

struct Recipe {
  const char* name;
  QuantizationRecipe recipe;
  bool hybrid;
};

QuantizationOptions options_of(const Recipe& recipe) {
  QuantizationOptions options;
  options.recipe = recipe.recipe;
  options.hybrid = recipe.hybrid;
  return options;
}

// Small whole numbers, of which every sum is exact in fp32 whatever its order; each row has its own
// size, so that scales differ.
at::Tensor whole_numbers(at::IntArrayRef shape, uint64_t seed) {
  at::manual_seed(seed);
  const at::Tensor values = at::randint(-8, 9, shape, at::kFloat);
  std::vector<int64_t> sizes(shape.size(), 1);
  sizes[0] = shape[0];
  return (values * at::pow(2.0, at::randint(-3, 4, sizes, at::kFloat))).to(at::kBFloat16);
}

at::Tensor counts_of(const std::vector<int64_t>& rows) {
  return at::tensor(rows, at::kLong).to(rows.size() % 2 == 0 ? at::kInt : at::kLong);
}

at::Tensor padded(const at::Tensor& x, int64_t unit) {
  return at::constant_pad_nd(x, {0, 0, 0, (unit - x.size(0) % unit) % unit});
}

// A linear layer with FP8 operands: y, dx and dw of its rows.
struct Products {
  at::Tensor y, dx, dw;
};
Products linear_products(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& w,
                         const QuantizationOptions& options, const at::Tensor& scales) {
  const auto by = [&](OperandRole role) {
    return scales.defined() ? TensorScale{scales.narrow(0, static_cast<int64_t>(role), 1), {}, {}}
                            : TensorScale();
  };
  const auto quantize = [&](const at::Tensor& t, OperandRole role) {
    return quantize_operand(padded(t, options.alignment()), role, options, kBoth, by(role));
  };
  const QuantizedTensor x8 = quantize(x, OperandRole::kInput),
                        g8 = quantize(dy, OperandRole::kGradient),
                        w8 = quantize(w, OperandRole::kWeight);
  Products all;
  all.y = quantized_product(x8.rows, w8.rows, at::kBFloat16, {}, true).narrow(0, 0, x.size(0));
  all.dx = quantized_product(g8.rows, w8.columns, at::kBFloat16, {}, false).narrow(0, 0, x.size(0));
  all.dw = at::zeros({w.size(0), w.size(1)}, at::kFloat);
  quantized_product_into(g8.columns, x8.columns, all.dw, 0.0);
  return all;
}

// The same of all experts; scales [E, 3] or undefined.
struct Inputs {
  at::Tensor x, dy, w, counts, scales = {}, before = {};
};
Inputs inputs_of(const std::vector<int64_t>& rows) {
  Inputs in;
  in.counts = counts_of(rows);
  const int64_t sum = in.counts.sum().item<int64_t>();
  in.x = whole_numbers({sum + kBeyond, kK}, 1);
  in.dy = whole_numbers({sum + kBeyond, kN}, 2);
  in.w = whole_numbers({static_cast<int64_t>(rows.size()), kN, kK}, 3);
  in.x.narrow(0, sum, kBeyond).fill_(std::nan(""));
  in.dy.narrow(0, sum, kBeyond).fill_(std::nan(""));
  return in;
}
Products grouped_products(const Inputs& in, const QuantizationOptions& options,
                          const at::Tensor& start = {}, const at::Tensor& amax = {}) {
  const auto by = [&](OperandRole role) {
    ExpertScales scales;
    const auto column = static_cast<int64_t>(role);
    if (in.scales.defined()) scales.scale = in.scales.select(1, column);
    if (amax.defined()) scales.new_amax = amax.select(1, column);
    return scales;
  };
  const QuantizedTensor x8 = quantize_expert_rows(in.x, in.counts, OperandRole::kInput, options,
                                                  kBoth, by(OperandRole::kInput)),
                        g8 = quantize_expert_rows(in.dy, in.counts, OperandRole::kGradient, options,
                                                  kBoth, by(OperandRole::kGradient)),
                        w8 = quantize_expert_weight(in.w, options, kBoth, by(OperandRole::kWeight));
  Products all;
  all.y = at::full({in.x.size(0), kN}, 5, at::kBFloat16);
  all.dx = at::full({in.x.size(0), kK}, 5, at::kBFloat16);
  all.dw = start.defined() ? start.clone() : at::full(in.w.sizes(), std::nan(""), at::kFloat);
  grouped_quantized_product_into(x8.rows, w8.rows, in.counts, all.y, true, in.before);
  grouped_quantized_product_into(g8.rows, w8.columns, in.counts, all.dx, false, in.before);
  grouped_quantized_weight_grad(g8.columns, x8.columns, in.counts, all.dw, start.defined());
  return all;
}

class GroupedFp8 : public ::testing::TestWithParam<Recipe> {
 protected:
  const QuantizationOptions options_ = options_of(GetParam());
};

TEST_P(GroupedFp8, EveryExpertIsALinearLayerOfItsRows) {
  for (const std::vector<int64_t>& rows : kLoads) {
    Inputs in = inputs_of(rows);
    const auto experts = static_cast<int64_t>(rows.size());
    if (options_.recipe == QuantizationRecipe::kDelayed) {
      at::manual_seed(4);
      in.scales = at::pow(2.0, at::randint(-2, 3, {experts, 3}, at::kFloat)).mul_(3);
    }
    const at::Tensor start = whole_numbers({experts, kN, kK}, 5).to(at::kFloat);
    const Products assigned = grouped_products(in, options_),
                   added = grouped_products(in, options_, start);
    for (int64_t expert = 0, first = 0; expert < experts; first += rows[expert++]) {
      const std::string what = "expert " + std::to_string(expert);
      if (rows[expert] == 0) {
        EXPECT_TRUE(at::equal(added.dw[expert], start[expert])) << what;
        EXPECT_EQ(assigned.dw[expert].abs().max().item<float>(), 0.0f) << what;
        continue;
      }
      const auto own = [&](const at::Tensor& t) { return t.narrow(0, first, rows[expert]); };
      const Products alone =
          linear_products(own(in.x), own(in.dy), in.w[expert], options_,
                          in.scales.defined() ? in.scales[expert] : at::Tensor());
      EXPECT_TRUE(at::equal(own(assigned.y), alone.y)) << what;
      EXPECT_TRUE(at::equal(own(assigned.dx), alone.dx)) << what;
      EXPECT_TRUE(at::equal(assigned.dw[expert], alone.dw)) << what;
      EXPECT_TRUE(at::equal(added.dw[expert], start[expert] + alone.dw)) << what;
    }
    const at::Tensor behind = assigned.y.narrow(0, in.x.size(0) - kBeyond, kBeyond);
    EXPECT_TRUE((behind == 5).all().item<bool>()) << "rows behind the sum";
  }
}

// An expert's scales come from its own rows: what others have is without effect.
TEST_P(GroupedFp8, OtherExpertsDoNotMatter) {
  Inputs in = inputs_of({20, 50, 7});
  const Products before = grouped_products(in, options_);
  in.x.narrow(0, 0, 20).mul_(64);
  in.dy.narrow(0, 70, 7).mul_(64);
  const Products after = grouped_products(in, options_);
  EXPECT_TRUE(at::equal(before.y.narrow(0, 20, 50), after.y.narrow(0, 20, 50)));
  EXPECT_TRUE(at::equal(before.dx.narrow(0, 20, 50), after.dx.narrow(0, 20, 50)));
  EXPECT_TRUE(at::equal(before.dw[1], after.dw[1]));
  EXPECT_FALSE(at::equal(before.y, after.y));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, GroupedFp8,
    ::testing::Values(Recipe{"tensorwise", QuantizationRecipe::kTensorwise, true},
                      Recipe{"delayed", QuantizationRecipe::kDelayed, true},
                      Recipe{"delayed_e4m3", QuantizationRecipe::kDelayed, false},
                      Recipe{"blockwise", QuantizationRecipe::kBlockwise, true},
                      Recipe{"blockwise_e4m3", QuantizationRecipe::kBlockwise, false}),
    [](const auto& info) { return info.param.name; });

// Scaling by blocks: the rows of an expert give the same bits in one call and in several.
TEST(GroupedFp8Blocks, RowsAreIndependentOfCalls) {
  const QuantizationOptions options =
      options_of({"blockwise", QuantizationRecipe::kBlockwise, true});
  at::manual_seed(1);
  Inputs in = inputs_of({150, 40});
  in.x = at::randn(in.x.sizes()).to(at::kBFloat16);
  in.dy = at::randn(in.dy.sizes()).to(at::kBFloat16);
  const Products whole = grouped_products(in, options);
  for (const int64_t cut : {1, 31, 128}) {
    Inputs part = in;
    part.x = in.x.narrow(0, cut, 190 - cut);
    part.dy = in.dy.narrow(0, cut, 190 - cut);
    part.counts = counts_of({150 - cut, 40});
    part.before = at::tensor({cut, int64_t{0}}, at::kLong);
    const Products rest = grouped_products(part, options);
    EXPECT_TRUE(at::equal(rest.y, whole.y.narrow(0, cut, 190 - cut))) << cut;
    EXPECT_TRUE(at::equal(rest.dx, whole.dx.narrow(0, cut, 190 - cut))) << cut;
  }
}

// A scale of 0 was never measured: the rows' own largest magnitude takes its place.
// Twice the magnitudes give half of the scales, exactly.
TEST(GroupedFp8Tensorwise, ScalesFollowMagnitudesThatAreKnown) {
  const QuantizationOptions options =
      options_of({"tensorwise", QuantizationRecipe::kTensorwise, true});
  const Inputs in = inputs_of({20, 0, 30});
  const auto scales = [&](const at::Tensor& row_amax) {
    ExpertScales by;
    by.row_amax = row_amax;
    const auto codes =
        quantize_expert_rows(in.dy, in.counts, OperandRole::kGradient, options, kBoth, by);
    return codes.rows.scale.select(1, 0).index({at::tensor({0, 2})});
  };
  const at::Tensor known = in.dy.abs().amax(1).to(at::kFloat);
  EXPECT_TRUE(at::equal(scales(known), scales({})));
  EXPECT_TRUE(at::equal(scales(known * 2), scales({}) / 2));
}

TEST(GroupedFp8Delayed, ScalesAndWhatIsMeasured) {
  const QuantizationOptions options = options_of({"delayed", QuantizationRecipe::kDelayed, true});
  Inputs in = inputs_of({20, 0, 30});
  in.scales = at::zeros({3, 3});
  at::Tensor amax = at::full({3, 3}, 0.125f);
  const Products unknown = grouped_products(in, options, {}, amax);
  const Products own = grouped_products(
      inputs_of({20, 0, 30}), options_of({"tensorwise", QuantizationRecipe::kTensorwise, true}));
  EXPECT_TRUE(at::equal(unknown.y.narrow(0, 0, 50), own.y.narrow(0, 0, 50)));
  EXPECT_TRUE(at::equal(unknown.dw, own.dw));
  const auto largest = [](const at::Tensor& t) { return t.abs().max().item<float>(); };
  EXPECT_EQ(amax[0][0].item<float>(), largest(in.x.narrow(0, 0, 20)));
  EXPECT_EQ(amax[2][2].item<float>(), largest(in.dy.narrow(0, 20, 30)));
  EXPECT_EQ(amax[1][1].item<float>(), largest(in.w[1]));
  EXPECT_EQ(amax[1][0].item<float>(), 0.125f) << "an expert without rows";
  at::Tensor alone = at::zeros({3, 3});
  raise_expert_amax(in.x, in.counts, alone.select(1, 0));
  EXPECT_TRUE(at::equal(alone.select(1, 0).index({at::tensor({0, 2})}),
                        amax.select(1, 0).index({at::tensor({0, 2})})));
  in.scales.fill_(1e-3);
  EXPECT_FALSE(at::equal(grouped_products(in, options).y.narrow(0, 0, 50), own.y.narrow(0, 0, 50)));
}

}  // namespace
}  // namespace megatron::expert_fp8
