#include "megatron/base/check.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/gemm.h"
#include "tests/unit/error_of.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

class BatchInvariantMode : public ::testing::Test {
 protected:
  void SetUp() override { set_batch_invariant(true); }
  void TearDown() override { set_batch_invariant(false); }
};

TEST_F(BatchInvariantMode, RowsOfProductsDoNotDependOnThoseBesideThem) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const auto& [k, n] : {std::pair{5, 7}, {64, 130}, {300, 33}, {1100, 512}, {7000, 3}}) {
      const at::Tensor x = draw({300, k}, type), w = draw({n, k}, type, 2);
      const at::Tensor bias = draw({n}, type, 3), addend = draw({300, n}, type, 4);
      const at::Tensor whole = linear_forward(x, w, bias, addend);
      const at::Tensor exact = at::addmm(bias, x, w.t()) + addend;
      EXPECT_LT(relative_error(whole, exact), type == at::kFloat ? 1e-5 : 1e-13) << k;
      for (const int64_t m : {1, 2, 3, 4, 7, 8, 16, 17, 64, 100, 256})
        for (const int64_t first : {int64_t{0}, 300 - m})
          EXPECT_TRUE(
              at::equal(whole.narrow(0, first, m),
                        linear_forward(x.narrow(0, first, m), w, bias, addend.narrow(0, first, m))))
              << m << " rows of " << k;
    }
}

struct Operands {
  at::Tensor q, k, v;
};

Operands operands(at::ScalarType type, int64_t s = 37, int64_t b = 3) {
  return {draw({s, b, 6, 20}, type), draw({s, b, 2, 20}, type, 2), draw({s, b, 2, 12}, type, 3)};
}

std::vector<AttentionOptions> kinds(at::ScalarType type) {
  AttentionOptions plain;
  plain.scale = 0.3;
  AttentionOptions window = plain;
  window.window_left = 5;
  window.softcap = 2.0;
  AttentionOptions sinks = plain;
  sinks.sinks = draw({6}, type, 5);
  return {plain, window, sinks};
}

// Chunks of a prompt, and a sample alone, have the bits of the whole.
TEST_F(BatchInvariantMode, QueriesDoNotDependOnThoseBesideThem) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const AttentionOptions& options : kinds(at::kFloat)) {
      const auto [q, k, v] = operands(type);
      const at::Tensor whole = core_attention(q, k, v, options);
      for (const auto& [first, count] : {std::pair{0, 1}, {0, 9}, {9, 1}, {10, 20}, {30, 7}})
        for (int64_t b = 0; b < 3; ++b) {
          const int64_t end = first + count;
          EXPECT_TRUE(at::equal(whole.narrow(0, first, count).narrow(1, b, 1),
                                core_attention(q.narrow(0, first, count).narrow(1, b, 1),
                                               k.narrow(0, 0, end).narrow(1, b, 1),
                                               v.narrow(0, 0, end).narrow(1, b, 1), options)));
        }
    }
}

TEST_F(BatchInvariantMode, AttentionAndItsGradientsAreThoseOfOtherKernels) {
  for (AttentionOptions options : kinds(at::kDouble))
    for (const bool causal : {true, false}) {
      if (!causal && options.window_left >= 0) continue;
      options.causal = causal;
      std::vector<at::Tensor> found[2];
      for (const bool on : {false, true}) {
        set_batch_invariant(on);
        auto [q, k, v] = operands(at::kDouble);
        for (at::Tensor* t : {&q, &k, &v}) t->requires_grad_(true);
        const at::Tensor out = core_attention(q, k, v, options);
        out.backward(draw(out.sizes(), at::kDouble, 9));
        found[on] = {out, q.grad(), k.grad(), v.grad()};
      }
      for (size_t i = 0; i < 4; ++i) EXPECT_LT(relative_error(found[1][i], found[0][i]), 1e-13);
    }
}

// [1, 1, s, s], True where documents of these lengths differ.
at::Tensor borders(const std::vector<int64_t>& lengths) {
  std::vector<at::Tensor> ids;
  for (const int64_t length : lengths)
    ids.push_back(at::full({length}, static_cast<int64_t>(ids.size()), at::kLong));
  const at::Tensor all = at::cat(ids);
  return all.unsqueeze(1).ne(all.unsqueeze(0)).unsqueeze(0).unsqueeze(0);
}

TEST_F(BatchInvariantMode, PackedDocumentsHaveTheBitsOfEachAlone) {
  for (AttentionOptions options : kinds(at::kFloat)) {
    const auto [q, k, v] = operands(at::kFloat);
    AttentionOptions packed = options;
    packed.mask = borders({9, 1, 20, 7});
    const at::Tensor whole = core_attention(q, k, v, packed);
    int64_t first = 0;
    for (const int64_t length : {9, 1, 20, 7}) {
      EXPECT_TRUE(at::equal(whole.narrow(0, first, length),
                            core_attention(q.narrow(0, first, length), k.narrow(0, first, length),
                                           v.narrow(0, first, length), options)));
      first += length;
    }
  }
}

TEST_F(BatchInvariantMode, RefusesWhatDependsOnMore) {
  const auto [q, k, v] = operands(at::kFloat);
  const auto refusal = [&, q = q, k = k, v = v](const AttentionOptions& options) {
    return error_of([&] { core_attention(q, k, v, options); });
  };
  AttentionOptions options;
  options.mask = borders({9, 28});
  options.mask[0][0][30][20] = true;
  EXPECT_EQ(refusal(options),
            "batch-invariant attention knows no mask but the borders of documents");
  options = {};
  options.distance_bias = at::zeros({6, 73}, at::kFloat);
  EXPECT_EQ(refusal(options),
            "--batch-invariant-mode cannot compute this attention: relative positions are added to "
            "the scores");
  EXPECT_EQ(error_of([] {
              linear_forward(draw({2, 8}, at::kBFloat16), draw({3, 8}, at::kBFloat16), {});
            }),
            "batch-invariant products are built for fp32 and fp64 on a CPU, not for BFloat16 on a "
            "CPU");
}

}  // namespace
}  // namespace megatron
