// FP8 operands against ATen's float8 types and plain fp32 arithmetic.
#include "megatron/tensor/quantization.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/shape.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

class Fp8Types : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  double largest() const { return GetParam() == at::kFloat8_e4m3fn ? 448.0 : 57344.0; }
  // The codes by ATen, which saturates nothing.
  at::Tensor cast(const at::Tensor& x) const {
    return x.to(at::kFloat).clamp(-largest(), largest()).to(GetParam());
  }
};

at::Tensor bytes(const at::Tensor& codes) { return codes.contiguous().view(at::kByte); }

TEST_P(Fp8Types, EveryNumberOfBf16IsRoundedAsByATen) {
  const at::Tensor all = at::arange(65536, at::kInt).to(at::kShort).view(at::kBFloat16);
  const at::Tensor finite = at::where(all.isfinite(), all, at::zeros_like(all)).view({256, 256});
  const QuantizedTensor got = quantize_tensor(finite, GetParam(), {}, {at::ones({1})});
  EXPECT_TRUE(at::equal(bytes(got.rows.codes), bytes(cast(finite))));
  EXPECT_TRUE(at::equal(bytes(got.columns.codes), bytes(cast(finite.t()))));
}

TEST_P(Fp8Types, OneScaleBringsTheLargestToTheEnd) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat, at::kHalf}) {
    const at::Tensor x = draw({3, 16, 48}, type) * 5;
    const at::Tensor amax = x.abs().max().to(at::kFloat),
                     scale = at::full({}, largest(), at::kFloat) / amax;
    EXPECT_TRUE(at::equal(largest_magnitude(x).squeeze(), amax));
    at::Tensor next = at::full({1}, 2.0f, at::kFloat);
    const QuantizedTensor got = quantize_tensor(x, GetParam(), {}, {.new_amax = next});
    const at::Tensor codes = cast(x.to(at::kFloat).view({48, 48}) * scale);
    EXPECT_TRUE(at::equal(bytes(got.rows.codes), bytes(codes)));
    EXPECT_TRUE(at::equal(bytes(got.columns.codes), bytes(codes.t())));
    EXPECT_TRUE(at::equal(got.rows.scale[0], scale));
    EXPECT_TRUE(at::equal(got.rows.scale[kFp8InverseAt], 1 / scale));
    EXPECT_TRUE(at::equal(next.squeeze(), amax)) << "recorded for the next step";
    EXPECT_LT(relative_error(dequantize(got.rows), codes.to(at::kFloat) / scale), 1e-6);
    const QuantizedTensor again = quantize_tensor(x, GetParam(), {false, true}, {got.rows.scale});
    EXPECT_FALSE(again.rows.defined());
    EXPECT_TRUE(at::equal(bytes(again.columns.codes), bytes(got.columns.codes)))
        << "by the scale of before";
  }
}

// By the largest power of two that E4M3 holds its largest value with.
TEST(Fp8Rows, ARowIsRoundedByItsOwnLargestValueAsByATen) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat, at::kHalf}) {
    const at::Tensor x = (draw({3, 7, 48}) * draw({3, 7, 1}, at::kDouble, 2).exp()).to(type);
    const at::Tensor rows = x.to(at::kFloat).view({21, 48}),
                     scale = at::exp2(
                                 at::floor(at::log2(
                                     448.0 / rows.abs().amax(1, /*keepdim=*/true).to(at::kDouble))))
                                 .to(at::kFloat);
    const QuantizedMatrix got = quantize_rows(x);
    EXPECT_EQ(got.layout, ScaleLayout::kRow);
    EXPECT_TRUE(at::equal(bytes(got.codes), bytes((rows * scale).to(at::kFloat8_e4m3fn))));
    EXPECT_TRUE(at::equal(got.scale, (1 / scale).squeeze(1)));
    EXPECT_LT(relative_error(dequantize(got), rows), 0.04);
    // In a product with a matrix of one scale.
    const QuantizedMatrix w =
        with_row_scales(quantize_tensor(draw({32, 48}, type), at::kFloat8_e4m3fn, {}).rows);
    EXPECT_LT(relative_error(quantized_product(got, w, at::kFloat, {}, /*fast=*/true),
                             at::mm(dequantize(got), dequantize(w).t())),
              1e-6);
  }
}

TEST_P(Fp8Types, BlocksAreScaledByPowersOfTwo) {
  const at::Tensor x = (draw({256, 384}) * draw({256, 1}, at::kDouble, 2).exp() *
                        draw({1, 384}, at::kDouble, 3).exp())
                           .to(at::kBFloat16);
  const auto power = [&](const at::Tensor& amax) {
    return at::exp2(at::floor(at::log2(at::full({}, largest(), at::kDouble) / amax)));
  };
  const at::Tensor wide = x.to(at::kDouble);
  const auto vectors = [&](const at::Tensor& m) {
    const at::Tensor blocks = m.contiguous().view({m.size(0), m.size(1) / 128, 128});
    const at::Tensor scale = power(blocks.abs().amax(2, /*keepdim=*/true));
    return std::pair{cast(blocks * scale).view(m.sizes()),
                     at::reciprocal(scale).squeeze(2).t().to(at::kFloat)};
  };
  const QuantizedTensor got = quantize_blocks(x, GetParam(), {}, /*square=*/false);
  const auto [rows, row_scales] = vectors(wide);
  const auto [columns, column_scales] = vectors(wide.t());
  EXPECT_TRUE(at::equal(bytes(got.rows.codes), bytes(rows)));
  EXPECT_TRUE(at::equal(got.rows.scale, row_scales));
  EXPECT_TRUE(at::equal(bytes(got.columns.codes), bytes(columns)));
  EXPECT_TRUE(at::equal(got.columns.scale, column_scales));
  EXPECT_LT(relative_error(dequantize(got.columns), wide.t()),
            GetParam() == at::kFloat8_e5m2 ? 0.13 : 0.07);

  const QuantizedTensor squares = quantize_blocks(x, GetParam(), {}, /*square=*/true);
  const at::Tensor tiles = wide.view({2, 128, 3, 128}),
                   scale = power(tiles.abs().amax(at::IntArrayRef{1, 3}, true));
  EXPECT_TRUE(at::equal(bytes(squares.rows.codes), bytes(cast(tiles * scale).view({256, 384}))));
  EXPECT_TRUE(at::equal(bytes(squares.columns.codes),
                        bytes(squares.rows.codes.to(at::kFloat).t().to(GetParam()))));
  EXPECT_TRUE(at::equal(squares.rows.scale.narrow(1, 0, 3),
                        at::reciprocal(scale).view({2, 3}).to(at::kFloat)));
  EXPECT_EQ(squares.rows.scale.size(1), 4) << "padded as cuBLASLt wants it";
  EXPECT_TRUE(at::equal(dequantize(squares.columns), dequantize(squares.rows).t()));
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Types, ::testing::Values(at::kFloat8_e4m3fn, at::kFloat8_e5m2),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(Quantization, ProductsAreThoseOfWhatTheCodesStandFor) {
  const at::Tensor a = draw({128, 256}, at::kBFloat16),
                   b = draw({384, 256}, at::kBFloat16, 2) * 0.1,
                   bias = draw({384}, at::kBFloat16, 3);
  for (const bool blocks : {false, true}) {
    const QuantizedMatrix x = (blocks ? quantize_blocks(a, at::kFloat8_e4m3fn, {}, false)
                                      : quantize_tensor(a, at::kFloat8_e4m3fn, {}))
                                  .rows;
    const QuantizedMatrix w = (blocks ? quantize_blocks(b, at::kFloat8_e4m3fn, {}, true)
                                      : quantize_tensor(b, at::kFloat8_e4m3fn, {}))
                                  .rows;
    const at::Tensor exact =
        at::matmul(dequantize(x).to(at::kDouble), dequantize(w).to(at::kDouble).t());
    const at::Tensor y = quantized_product(x, w, at::kBFloat16, bias, true);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_LT(relative_error(y, exact + bias.to(at::kDouble)), 4e-3);
    const at::Tensor addend = draw({2, 64, 384}, at::kBFloat16, 5);
    const at::Tensor sum = quantized_product(x, w, at::kBFloat16, bias, true, addend);
    EXPECT_LT(
        relative_error(sum, exact + bias.to(at::kDouble) + addend.view({128, 384}).to(at::kDouble)),
        4e-3);
    EXPECT_LT(relative_error(quantized_product(x, w, at::kFloat, {}, false), exact), 1e-5);
    const at::Tensor start = draw({128, 384}, at::kFloat, 4);
    at::Tensor target = start.clone();
    quantized_product_into(x, w, target, 1.0);
    EXPECT_LT(relative_error(target, start.to(at::kDouble) + exact), 1e-5);
    target.fill_(std::nan(""));
    quantized_product_into(x, w, target, 0.0);
    EXPECT_LT(relative_error(target, exact), 1e-5) << "beta = 0 must not read the target";
  }
}

TEST(Quantization, WrongOperandsAreNamed) {
  const at::Tensor x = draw({128, 128}, at::kBFloat16);
  const QuantizedMatrix one = quantize_tensor(x, at::kFloat8_e4m3fn, {}).rows,
                        blocks = quantize_blocks(x, at::kFloat8_e4m3fn, {}, false).rows;
  EXPECT_THROW(quantized_product(one, blocks, at::kBFloat16, {}, false), InternalError);
  EXPECT_THROW(quantized_product(one, {}, at::kBFloat16, {}, false), InternalError);
  EXPECT_THROW(quantize_blocks(draw({128, 130}), at::kFloat8_e4m3fn, {}, false), InternalError);
  EXPECT_THROW(quantize_tensor(x, at::kBFloat16, {}), InternalError);
}

at::Tensor fp4_golden(const std::string& name) {
  static const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/fp4/fp4.safetensors");
  const SafetensorsEntry& entry = file.entry(name);
  at::Tensor out = at::empty(entry.shape, to_scalar_type(entry.dtype));
  file.read(entry, out.data_ptr());
  return out;
}

TEST(Nvfp4, EqualsNumpy) {
  const at::Tensor x = fp4_golden("x").to(at::kBFloat16);
  ASSERT_TRUE(at::equal(x.to(at::kFloat), fp4_golden("x")));
  const auto expect = [](const QuantizedMatrix& got, const std::string& name) {
    EXPECT_TRUE(at::equal(got.codes.to(at::kFloat), fp4_golden(name))) << name;
    EXPECT_TRUE(at::equal(got.scale.narrow(0, 0, 1), fp4_golden(name + "_scale"))) << name;
  };
  const QuantizedTensor input = quantize_nvfp4(x, OperandRole::kInput, {}),
                        weight = quantize_nvfp4(x, OperandRole::kWeight, {});
  expect(input.rows, "input");
  expect(input.columns, "input_columns");
  expect(weight.rows, "weight");
  EXPECT_TRUE(at::equal(weight.columns.codes, weight.rows.codes.t()));
}

TEST(Nvfp4, GradientsAreRoundedToNeighboursWithoutBias) {
  const at::Tensor x = draw({512, 256}, at::kBFloat16);
  const at::Tensor exact = x.to(at::kDouble),
                   nearest = dequantize(quantize_nvfp4(x, OperandRole::kInput, {true, false}).rows)
                                 .to(at::kDouble);
  const QuantizedTensor got = quantize_nvfp4(x, OperandRole::kGradient, {true, false});
  const at::Tensor random = dequantize(got.rows).to(at::kDouble);
  EXPECT_TRUE(at::equal(
      dequantize(quantize_nvfp4(x, OperandRole::kGradient, {true, false}).rows).to(at::kDouble),
      random))
      << "the same bits again";
  EXPECT_FALSE(at::equal(random, nearest));
  // Of values within a narrow range, which to the nearest all go one way, the mean stays.
  const at::Tensor narrow = at::where(exact.abs().gt(1.1).logical_and(exact.abs().lt(1.2)),
                                      exact.abs(), at::zeros_like(exact));
  const at::Tensor taken = narrow.gt(0);
  const double mean = exact.abs().masked_select(taken).mean().item<double>(),
               count = taken.sum().item<double>();
  ASSERT_GT(count, 2000);
  EXPECT_NEAR(random.abs().masked_select(taken).mean().item<double>(), mean,
              0.5 * 4 / std::sqrt(count));
  EXPECT_LT((random - exact).abs().max().item<double>(), 1.5)
      << "a step of the largest values is a third of them";
}

TEST(Nvfp4, ProductsOverRowsKeepTheirMeaning) {
  const at::Tensor x = draw({256, 64}, at::kBFloat16), dy = draw({256, 48}, at::kBFloat16, 2);
  const at::Tensor exact = at::matmul(dy.to(at::kDouble).t(), x.to(at::kDouble));
  at::Tensor dw = at::zeros({48, 64});
  quantized_product_into(quantize_nvfp4(dy, OperandRole::kGradient, {}).columns,
                         quantize_nvfp4(x, OperandRole::kInput, {}).columns, dw, 0.0);
  const double error =
      (at::linalg_vector_norm(dw - exact, 2) / at::linalg_vector_norm(exact, 2)).item<double>();
  EXPECT_LT(error, 0.25) << "both operands are transformed alike";
  EXPECT_GT(error, 0.01) << "rounded to FP4";
}

}  // namespace
}  // namespace megatron
