// Causal attention with blocks in both directions on CUDA, against a mask in fp64 on the CPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include "megatron/models/mimo/image_blocks.h"
#include "megatron/tensor/torch.h"
#include "tests/gpu/timing.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

constexpr int64_t kImage = 7;

// Samples [b, s] with images of lengths that differ, two of them next to each other.
at::Tensor tokens_of(int64_t b, int64_t s) {
  at::Tensor tokens = at::zeros({b, s}, at::kLong);
  for (int64_t i = 0; i < b; ++i) {
    tokens[i].narrow(0, 3 + i, 40 + 9 * i).fill_(kImage);
    tokens[i].narrow(0, s / 2, 100).fill_(kImage);
    tokens[i].narrow(0, s - 1 - i, 1 + i).fill_(kImage);
  }
  return tokens;
}

std::shared_ptr<const TokenBlocks> blocks_of(const at::Tensor& tokens, at::Device device,
                                             std::span<const DocumentPlace> documents = {}) {
  return to_device(std::make_shared<const TokenBlocks>(image_blocks(
                       {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())},
                       tokens.size(0), kImage, documents)),
                   device);
}

// [b, s]: to which document a token belongs.
at::Tensor ids_of(std::span<const DocumentPlace> documents, int64_t b, int64_t s) {
  at::Tensor ids = at::zeros({b, s}, at::kLong);
  for (size_t i = 0; i < documents.size(); ++i)
    ids[documents[i].sample]
        .narrow(0, documents[i].begin, documents[i].length)
        .fill_(static_cast<int64_t>(i));
  return ids;
}

std::shared_ptr<const UnpaddedRows> rows_of(std::span<const DocumentPlace> documents, int64_t b,
                                            int64_t s, at::Device device) {
  if (documents.empty()) return nullptr;
  auto rows = std::make_shared<UnpaddedRows>(make_document_rows(documents, s, b));
  rows->offsets = rows->offsets.to(device);
  rows->counts = rows->counts.to(device);
  return rows;
}

struct Heads {
  int64_t n, g, d, v;
  int64_t window_left;
  bool recompute;
};

AttentionOptions options_of(const Heads& heads) {
  AttentionOptions o;
  o.scale = 0.1;
  o.window_left = heads.window_left;
  o.recompute = heads.recompute;
  return o;
}

// Its output and gradients, on the CPU.
template <class F>
Tensors results(Tensors qkv, const at::Tensor& dout, F&& attention) {
  for (at::Tensor& t : qkv) t = t.detach().requires_grad_();
  const at::Tensor out = attention(qkv);
  out.backward(dout);
  return {out.detach().cpu(), qkv[0].grad().cpu(), qkv[1].grad().cpu(), qkv[2].grad().cpu()};
}

void expect_blocks_of_the_mask(std::span<const DocumentPlace> documents) {
  const at::Device gpu(at::kCUDA, 0);
  const int64_t s = 512, b = 3;
  const at::Tensor tokens = tokens_of(b, s),
                   mask = image_block_mask(tokens, kImage, ids_of(documents, b, s));
  const auto blocks = blocks_of(tokens, gpu, documents);
  const auto rows = rows_of(documents, b, s, gpu);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (const Heads& heads : {Heads{8, 2, 128, 128, -1, false}, Heads{4, 4, 64, 64, 63, true},
                               Heads{4, 1, 256, 256, -1, false}}) {
      at::manual_seed(3);
      const Tensors qkv = {at::randn({s, b, heads.n, heads.d}).to(type),
                           at::randn({s, b, heads.g, heads.d}).to(type),
                           at::randn({s, b, heads.g, heads.v}).to(type)};
      const at::Tensor dout = at::randn({s, b, heads.n, heads.v}).to(type);
      AttentionOptions masked = options_of(heads);
      masked.causal = false;
      masked.mask = mask;
      Tensors wide, there;
      for (const at::Tensor& t : qkv) {
        wide.push_back(t.to(at::kDouble));
        there.push_back(t.to(gpu));
      }
      const Tensors expected = results(wide, dout.to(at::kDouble), [&](const Tensors& t) {
        return core_attention(t[0], t[1], t[2], masked);
      });
      ASSERT_EQ(
          why_not_blocks(there[0], there[1], there[2], *blocks, rows.get(), options_of(heads)), "");
      const auto run = [&] {
        return results(there, dout.to(gpu), [&](const Tensors& t) {
          return attention_with_blocks(t[0], t[1], t[2], blocks, rows, options_of(heads));
        });
      };
      const Tensors found = run(), again = run();
      for (size_t i = 0; i < found.size(); ++i) {
        const double error = (found[i].to(at::kDouble) - expected[i]).norm().item<double>() /
                             expected[i].norm().item<double>();
        EXPECT_LT(error, type == at::kHalf ? 2e-3 : 1e-2) << "of " << i << ", head " << heads.d;
        EXPECT_TRUE(found[i].equal(again[i])) << i;
      }
    }
}

TEST(TokenBlocksGpu, AreThoseOfTheMask) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  expect_blocks_of_the_mask({});
}

// A border lies in an image.
TEST(TokenBlocksGpu, AreThoseOfTheMaskWithinDocuments) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const std::vector<DocumentPlace> documents = {{0, 0, 20},  {0, 20, 280}, {0, 300, 212},
                                                {1, 0, 512}, {2, 0, 128},  {2, 128, 384}};
  expect_blocks_of_the_mask(documents);
}

// Beside causal attention alone, of which a decoder with images must keep 85%.
TEST(TokenBlocksGpu, CostLittle) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  const int64_t s = 4096, b = 2, n = 32, g = 8, d = 128;
  at::Tensor tokens = at::zeros({b, s}, at::kLong);
  for (int64_t i = 0; i < 4; ++i) tokens.narrow(1, 100 + 1000 * i, 256).fill_(kImage);
  const auto blocks = blocks_of(tokens, gpu);
  const auto leaf = [&](int64_t heads) {
    return at::randn({s, b, heads, d}, at::dtype(at::kBFloat16).device(gpu)).requires_grad_();
  };
  const at::Tensor q = leaf(n), k = leaf(g), v = leaf(g), dout = leaf(n).detach();
  const AttentionOptions options = options_of({n, g, d, d, -1, false});
  const std::vector<double> times = milliseconds(
      dout, {[&] { core_attention(q, k, v, options).backward(dout); },
             [&] { attention_with_blocks(q, k, v, blocks, nullptr, options).backward(dout); }});
  std::printf(
      "attention of 2 x 4096 tokens, forward and backward: causal %.3f ms, with four blocks "
      "of 256 a sample %.3f ms\n",
      times[0], times[1]);
  EXPECT_LT(times[1], 2.0 * times[0]);
}

}  // namespace
}  // namespace megatron
