#include "megatron/tensor/attention/unpadded_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

UnpaddedRows unpadded_of(const std::vector<std::vector<uint8_t>>& mask, int64_t multiple_of = 1) {
  std::vector<uint8_t> all;
  for (const std::vector<uint8_t>& sample : mask)
    all.insert(all.end(), sample.begin(), sample.end());
  std::vector<int64_t> samples(mask.size());
  std::iota(samples.begin(), samples.end(), 40);
  return make_unpadded_rows({all}, samples, multiple_of);
}

std::vector<int64_t> integers(const at::Tensor& t) {
  const at::Tensor flat = t.to(at::kLong).contiguous().view(-1);
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(UnpaddedRows, AreTheTextsOneAfterAnother) {
  // A hole, padding, a text up to the end, and one of padding alone, of which a token stays.
  const UnpaddedRows rows = unpadded_of({{1, 0, 1, 0, 0}, {1, 1, 1, 1, 1}, {0, 0, 0, 0, 0}});
  EXPECT_EQ(rows.lengths, (std::vector<int64_t>{3, 5, 1}));
  EXPECT_EQ(rows.holes, (std::vector<bool>{true, false, true}));
  EXPECT_EQ(rows.rows, 9);
  EXPECT_EQ(integers(rows.sample), (std::vector<int64_t>{40, 40, 40, 41, 41, 41, 41, 41, 42}));
  EXPECT_EQ(integers(rows.position), (std::vector<int64_t>{0, 1, 2, 0, 1, 2, 3, 4, 0}));
  EXPECT_EQ(integers(rows.places), (std::vector<int64_t>{0, 1, 2, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(integers(rows.rows_of),
            (std::vector<int64_t>{0, 1, 2, 9, 9, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9}));
  EXPECT_EQ(integers(rows.first), (std::vector<int64_t>{0, 3, 8}));
  EXPECT_EQ(integers(rows.kinds),
            (std::vector<int64_t>{0, 1, 0, 2, 2, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2}));
  EXPECT_EQ(integers(rows.offsets), (std::vector<int64_t>{0, 3, 8, 9}));
  EXPECT_EQ(integers(rows.counts), (std::vector<int64_t>{3, 5, 1}));
}

TEST(UnpaddedRows, EmptyOnesFillUpToFewNumbersOfRows) {
  const UnpaddedRows rows = unpadded_of({{1, 1, 0, 0}, {1, 0, 0, 0}}, 4);
  EXPECT_EQ(rows.rows, 4);
  EXPECT_EQ(integers(rows.sample), (std::vector<int64_t>{40, 40, 41, 41}));
  EXPECT_EQ(integers(rows.position), (std::vector<int64_t>{0, 1, 0, 0}));
  EXPECT_EQ(integers(rows.places), (std::vector<int64_t>{0, 1, 4, 8}));
  const at::Tensor column = at::arange(1, 9).view({2, 4});
  EXPECT_EQ(integers(rows.column(column)), (std::vector<int64_t>{1, 2, 5, 0}));
  // Batch of 32 samples of 512: 32 numbers, multiples of 512 rows.
  EXPECT_EQ(unpadded_row_count(1, 32 * 512, 1), 512);
  EXPECT_EQ(unpadded_row_count(9216, 32 * 512, 8), 9216);
  EXPECT_EQ(unpadded_row_count(9217, 32 * 512, 8), 9728);
  EXPECT_EQ(unpadded_row_count(16384, 32 * 512, 8), 16384);
  EXPECT_EQ(unpadded_row_count(2000, 2100, 1), 2048);
  EXPECT_EQ(unpadded_row_count(2060, 2100, 1), 2100);
  EXPECT_EQ(unpadded_row_count(5, 24, 3), 6);
}

TEST(UnpaddedRows, AsManyAsAreAskedFor) {
  const std::vector<uint8_t> mask = {1, 1, 0, 1, 0, 0};
  const UnpaddedRows rows = make_unpadded_rows({mask}, std::vector<int64_t>{4, 5}, 1, 8);
  EXPECT_EQ(rows.rows, 8);
  EXPECT_EQ(rows.most_empty, 5);
  EXPECT_EQ(integers(rows.sample), (std::vector<int64_t>{4, 4, 5, 5, 5, 5, 5, 5}));
  EXPECT_EQ(integers(rows.places), (std::vector<int64_t>{0, 1, 3, 6, 6, 6, 6, 6}));
}

TEST(UnpaddedRows, TextsGoOnToTheLastTokenOfTheLoss) {
  const std::vector<uint8_t> mask = {1, 0, 0, 0, 1, 1, 0, 0};
  const std::vector<float> counts = {1, 1, 1, 0, 1, 0, 0, 0};
  const UnpaddedRows rows = make_unpadded_rows({mask, counts}, std::vector<int64_t>{0, 1}, 1);
  EXPECT_EQ(rows.lengths, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(integers(rows.kinds), (std::vector<int64_t>{0, 1, 1, 2, 0, 0, 2, 2}));
  EXPECT_TRUE(at::equal(kinds_of_mask(at::tensor({1, 0, 0, 0, 1, 1, 0, 0}).view({2, 4}),
                                      at::tensor({1, 1, 1, 0, 1, 0, 0, 0}).view({2, 4})),
                        rows.kinds));
}

TEST(UnpaddedRows, KindsOfAMaskAreTheSameOnTheDevice) {
  const std::vector<std::vector<uint8_t>> mask = {
      {1, 0, 1, 0, 0}, {1, 1, 1, 1, 1}, {0, 0, 1, 0, 1}};
  const UnpaddedRows rows = unpadded_of(mask);
  at::Tensor tensor = at::empty({3, 5}, at::kByte);
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 5; ++j)
      tensor[i][j] = mask[static_cast<size_t>(i)][static_cast<size_t>(j)];
  EXPECT_TRUE(at::equal(kinds_of_mask(tensor), rows.kinds));
}

TEST(UnpaddedRows, DocumentsOfInterleavedSamplesAreRangesWithAStep) {
  const UnpaddedRows rows = make_document_rows(
      std::vector<DocumentPlace>{{0, 0, 300}, {0, 300, 212}, {1, 0, 512}}, /*s=*/512, /*b=*/2);
  EXPECT_EQ(rows.samples, 4);
  EXPECT_EQ(rows.length, 512);
  EXPECT_EQ(rows.rows, 1024);
  EXPECT_EQ(rows.step, 2);
  EXPECT_EQ(integers(rows.offsets.to(at::kLong)), (std::vector<int64_t>{0, 600, 1, 1024, 1024}));
  EXPECT_EQ(integers(rows.counts.to(at::kLong)), (std::vector<int64_t>{300, 212, 512, 0}));
  const std::vector<DocumentPlace> even = {{0, 0, 128}, {0, 128, 128}};
  EXPECT_EQ(make_document_rows(even, 256, 1).length, 256);
  EXPECT_EQ(make_document_rows(even, 200 + 56, 1).samples, 2);
  EXPECT_EQ(make_document_rows(std::vector<DocumentPlace>{{0, 0, 90}}, 90, 1).length, 90);
}

TEST(UnpaddedRows, FewPlansHaveMoreRangesAndLongerOnes) {
  const auto of = [](std::vector<int64_t> lengths) {
    std::vector<uint8_t> mask;
    const int64_t longest = *std::ranges::max_element(lengths);
    for (const int64_t length : lengths)
      for (int64_t i = 0; i < longest; ++i) mask.push_back(i < length ? 1 : 0);
    UnpaddedRows rows = make_unpadded_rows({mask}, std::vector<int64_t>(lengths.size(), 0), 1);
    use_few_plans(rows);
    return rows;
  };
  const UnpaddedRows rows = of({300, 20, 1100});
  EXPECT_EQ(rows.samples, 3);
  EXPECT_EQ(rows.length, 1100);
  EXPECT_EQ(rows.most, 1152);
  EXPECT_EQ(integers(rows.offsets.to(at::kLong)), (std::vector<int64_t>{0, 300, 320, 1420, 1420}));
  EXPECT_EQ(integers(rows.counts.to(at::kLong)), (std::vector<int64_t>{300, 20, 1100, 0}));
  EXPECT_EQ(of({64}).most, 64);
  EXPECT_EQ(of({65}).most, 128);
  EXPECT_EQ(of({8192, 1}).most, 8192);
  EXPECT_EQ(of({8193, 1}).most, 9216);
}

struct UnpaddedCase {
  const char* name;
  bool causal = false;
  bool cross = false;
  bool holes = false;
  double dropout = 0.0;
  bool bias = false;
  int64_t groups = 4;
  int64_t window = -1;
};

void PrintTo(const UnpaddedCase& c, std::ostream* out) { *out << c.name; }

class UnpaddedAttention : public testing::TestWithParam<std::tuple<UnpaddedCase, bool>> {};

// [R, 1, n, d] of samples with padding [s, b, n, d].
at::Tensor without_padding(const at::Tensor& x, const UnpaddedRows& rows) {
  return take_rows(x.transpose(0, 1).reshape({-1, x.size(2), x.size(3)}), rows.places).unsqueeze(1);
}

TEST_P(UnpaddedAttention, IsThatOfTheTextsWithPadding) {
  const auto& [c, padded] = GetParam();
  const std::vector<std::vector<uint8_t>> texts = {{1, 1, 1, 1, 1, 0, 0, 0},
                                                   {1, 1, 0, 1, 0, 1, 1, 0},
                                                   {1, 1, 1, 1, 1, 1, 1, 1},
                                                   {1, 0, 0, 0, 0, 0, 0, 0}},
                                          others = {{1, 1, 0, 0, 0, 0},
                                                    {1, 1, 1, 1, 1, 1},
                                                    {0, 1, 1, 1, 0, 0},
                                                    {1, 0, 1, 0, 0, 0}};
  const auto filled = [&](std::vector<std::vector<uint8_t>> mask) {
    for (std::vector<uint8_t>& sample : mask) {
      auto end = sample.end();
      while (end != sample.begin() && *(end - 1) == 0) --end;
      if (!c.holes) std::fill(sample.begin(), end, uint8_t{1});
    }
    return mask;
  };
  AttendedRows rows{std::make_shared<const UnpaddedRows>(unpadded_of(filled(texts), 5))};
  if (c.cross) rows.keys = std::make_shared<const UnpaddedRows>(unpadded_of(filled(others), 7));
  const UnpaddedRows &queries = *rows.queries, &keys = rows.of_keys();
  const int64_t s = queries.length, s_k = keys.length, b = 4, n = 4, d = 6;
  ASSERT_GT(queries.rows, 21);  // there are empty ones
  const at::Tensor q = draw({s, b, n, d}), k = draw({s_k, b, c.groups, d}, at::kDouble, 2),
                   v = draw({s_k, b, c.groups, d}, at::kDouble, 3),
                   dout = draw({s, b, n, d}, at::kDouble, 4),
                   bias = draw({n, s + s_k - 1}, at::kDouble, 5);
  AttentionOptions options;
  options.causal = c.causal;
  options.scale = 0.4;
  options.window_left = options.window_right = c.window;
  if (c.bias) options.distance_bias = bias;
  options.dropout = c.dropout;
  options.key = random_key(1, "attention");
  options.first_head = 3;

  // Of tokens that are padding neither outputs nor gradients count.
  const at::Tensor is_text = (queries.kinds != 2).t().view({s, b, 1, 1});
  AttentionOptions whole = options;
  whole.place = {at::arange(40, 44), at::arange(s)};
  whole.key_position = at::arange(s_k);
  const at::Tensor of_queries = c.cross ? at::zeros({b, s}, at::kLong) : queries.kinds;
  whole.mask = (of_queries.unsqueeze(2) != keys.kinds.unsqueeze(1)).unsqueeze(1);
  const auto leaf = [](const at::Tensor& x) { return x.clone().requires_grad_(); };
  const at::Tensor q1 = leaf(q), k1 = leaf(k), v1 = leaf(v), bias1 = leaf(bias);
  if (c.bias) whole.distance_bias = bias1;
  const at::Tensor expected = core_attention(q1, k1, v1, whole);
  expected.backward(dout * is_text);

  const at::Tensor q2 = leaf(without_padding(q, queries)), k2 = leaf(without_padding(k, keys)),
                   v2 = leaf(without_padding(v, keys)), bias2 = leaf(bias);
  if (c.bias) options.distance_bias = bias2;
  const at::Tensor out = padded ? attention_with_padding(q2, k2, v2, rows, options)
                                : unpadded_attention(q2, k2, v2, rows, options);
  out.backward(
      at::where(queries.places.view({-1, 1, 1, 1}) == b * s, 1e6, without_padding(dout, queries)));
  EXPECT_LT(relative_error(out, without_padding(expected, queries)), 1e-13);
  EXPECT_LT(relative_error(q2.grad(), without_padding(q1.grad(), queries)), 1e-13);
  EXPECT_LT(relative_error(k2.grad(), without_padding(k1.grad(), keys)), 1e-13);
  EXPECT_LT(relative_error(v2.grad(), without_padding(v1.grad(), keys)), 1e-13);
  if (c.bias) {
    EXPECT_LT(relative_error(bias2.grad(), bias1.grad()), 1e-13);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, UnpaddedAttention,
    testing::Combine(
        testing::ValuesIn(std::vector<UnpaddedCase>{
            {.name = "bidirectional"},
            {.name = "causal", .causal = true},
            {.name = "holes", .holes = true},
            {.name = "causal_holes", .causal = true, .holes = true},
            {.name = "dropout", .holes = true, .dropout = 0.3},
            {.name = "bias", .bias = true},
            {.name = "causal_bias_holes", .causal = true, .holes = true, .bias = true},
            {.name = "cross", .cross = true},
            {.name = "cross_holes_dropout", .cross = true, .holes = true, .dropout = 0.3},
            {.name = "grouped", .groups = 2},
            {.name = "window", .window = 2}}),
        testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) +
             (std::get<1>(info.param) ? "_with_padding" : "");
    });

TEST(TakeRows, WritesEachGradientOnceAndZerosForNone) {
  at::Tensor x = draw({4, 3}).requires_grad_();
  const at::Tensor index = at::tensor({2, 4, 0, 4}, at::kLong);
  const at::Tensor taken = take_rows(x, index);
  EXPECT_TRUE(at::equal(taken.detach(), at::stack({x.detach()[2], at::zeros({3}, at::kDouble),
                                                   x.detach()[0], at::zeros({3}, at::kDouble)})));
  const at::Tensor grad = draw({4, 3}, at::kDouble, 2);
  taken.backward(grad);
  const at::Tensor none = at::zeros({3}, at::kDouble);
  EXPECT_TRUE(at::equal(x.grad(), at::stack({grad[2], none, grad[0], none})));
}

}  // namespace
}  // namespace megatron
