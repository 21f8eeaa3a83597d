// Attention over merged blocks of keys against attention over all keys.
#include "megatron/tensor/attention/attention_block.h"

#include <torch/csrc/autograd/autograd.h>

#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

struct Whole {
  at::Tensor out, dq, dk, dv;
};

Whole attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout,
             const AttentionOptions& options) {
  const at::Tensor a = q.detach().requires_grad_(), b = k.detach().requires_grad_(),
                   c = v.detach().requires_grad_();
  const at::Tensor out = core_attention(a, b, c, options);
  torch::autograd::backward({out}, {dout});
  return {out.detach(), a.grad(), b.grad(), c.grad()};
}

// Keys in three parts of different lengths, in the order 1, 2, 0.
TEST(AttentionBlock, PartsOfTheKeysAddUp) {
  for (const auto& [type, tolerance] :
       {std::pair{at::kDouble, 1e-12}, {at::kFloat, 2e-6}, {at::kBFloat16, 2e-2}}) {
    for (const bool dropout : {false, true}) {
      const int64_t s = 7, s_k = 12, b = 2, n = 6, g = 2, d = 4;
      const at::Tensor q = draw({s, b, n, d}, type, 1), k = draw({s_k, b, g, d}, type, 2),
                       v = draw({s_k, b, g, 3}, type, 3);
      const at::Tensor dout = draw({s, b, n, 3}, type, 4);
      AttentionOptions options;
      options.causal = false;
      options.scale = 0.7;
      options.softcap = dropout ? 0.6 : 0.0;
      at::manual_seed(9);
      options.mask = at::rand({b, 1, s, s_k}) < 0.4;
      options.mask.select(2, 3).narrow(2, 4, 8).fill_(
          true);  // a query whose first two parts are empty
      options.mask.select(2, 3).narrow(2, 0, 1).fill_(false);
      options.mask.select(2, 5).fill_(true);  // and one that sees nothing at all
      if (dropout) {
        options.dropout = 0.3;
        options.key = random_key(1, "attention");
        options.place = {at::arange(b), at::arange(s)};
        options.key_position = at::arange(s_k);
      }
      const Whole expected = attend(q, k, v, dout, options);
      const std::pair<int64_t, int64_t> parts[] = {{4, 5}, {9, 3}, {0, 4}};
      const auto part_options = [&](int64_t first, int64_t count) {
        AttentionOptions o = options;
        o.mask = o.mask.narrow(3, first, count);
        if (dropout) o.key_position = o.key_position.narrow(0, first, count);
        return o;
      };
      AttentionBlock total;
      for (const auto& [first, count] : parts) {
        const AttentionBlock block = attention_block_forward(
            q, k.narrow(0, first, count), v.narrow(0, first, count), part_options(first, count));
        if (!total.out.defined()) {
          total = {block.out.to(block.lse.scalar_type()), block.lse};
        } else {
          add_attention_block(total, block);
        }
      }
      EXPECT_EQ(total.lse.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
      const at::Tensor out = total.out.to(type);
      EXPECT_LT(relative_error(out, expected.out), tolerance);
      EXPECT_TRUE(total.lse.select(2, 5).isneginf().all().item<bool>());
      at::Tensor dq = at::zeros_like(q);
      for (const auto& [first, count] : parts) {
        const auto [dq_part, dk, dv] =
            attention_block_backward(dout, q, k.narrow(0, first, count), v.narrow(0, first, count),
                                     out, total.lse, part_options(first, count));
        dq = dq + dq_part;
        EXPECT_LT(relative_error(dk, expected.dk.narrow(0, first, count)), tolerance);
        EXPECT_LT(relative_error(dv, expected.dv.narrow(0, first, count)), tolerance);
      }
      EXPECT_LT(relative_error(dq, expected.dq), tolerance);
    }
  }
}

TEST(AttentionBlock, OneBlockIsTheWholeWithWindowsAndEarlierKeys) {
  const at::Tensor q = draw({5, 2, 4, 4}, at::kDouble, 1), k = draw({11, 2, 2, 4}, at::kDouble, 2);
  const at::Tensor v = draw({11, 2, 2, 4}, at::kDouble, 3),
                   dout = draw({5, 2, 4, 4}, at::kDouble, 4);
  for (const int64_t window : {-1, 3}) {
    AttentionOptions options;
    options.window_left = window;
    const Whole expected = attend(q, k, v, dout, options);
    const AttentionBlock block = attention_block_forward(q, k, v, options);
    const auto [dq, dk, dv] =
        attention_block_backward(dout, q, k, v, block.out, block.lse, options);
    EXPECT_LT(relative_error(block.out, expected.out), 1e-12);
    EXPECT_LT(relative_error(dq, expected.dq), 1e-12);
    EXPECT_LT(relative_error(dk, expected.dk), 1e-12);
    EXPECT_LT(relative_error(dv, expected.dv), 1e-12);
  }
}

}  // namespace
}  // namespace megatron
