// Attention over a paged cache against core attention over each sequence by itself.
#include "megatron/tensor/attention/paged_attention.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kBlockSize = 4, kBlocks = 12;

// Three sequences of 1, 7 and 9 positions whose blocks lie mingled.
const std::vector<std::vector<int32_t>> kTables = {{11}, {3, 8}, {0, 10, 5}};

struct Sequences {
  Sequences(int64_t heads, int64_t groups, int64_t d, int64_t v, at::ScalarType type) {
    at::manual_seed(1);
    for (const int64_t length : {1, 7, 9}) {
      q.push_back(at::randn({length, 1, heads, d}, at::kDouble).to(type));
      k.push_back(at::randn({length, 1, groups, d}, at::kDouble).to(type));
      this->v.push_back(at::randn({length, 1, groups, v}, at::kDouble).to(type));
    }
  }
  std::vector<at::Tensor> q, k, v;
};

struct Part {
  size_t sequence;
  int64_t first, count;
};

class Cache {
 public:
  // The parts' rows written to the cache, and their attention: [t, 1, n, v].
  at::Tensor step(const Sequences& s, const std::vector<Part>& parts,
                  const AttentionOptions& options) {
    std::vector<RaggedPart> ragged;
    for (const Part& part : parts)
      ragged.push_back({part.first, part.count, kTables[part.sequence]});
    const PagedRows rows(std::move(ragged), kBlocks, kBlockSize, at::kCPU);
    const auto of = [&](const std::vector<at::Tensor>& all) {
      std::vector<at::Tensor> own;
      for (const Part& part : parts)
        own.push_back(all[part.sequence].narrow(0, part.first, part.count));
      return at::cat(own);
    };
    keys.write(rows, of(s.k).squeeze(1));
    values.write(rows, of(s.v).squeeze(1));
    return attend_parts(
        rows, of(s.q),
        [&](const at::Tensor& q) {
          return paged_attention(q, keys.view(), values.view(), rows, options);
        },
        [&](const RaggedPart& part, const at::Tensor& q) {
          const int64_t from = first_seen(part, options);
          return core_attention(q, keys.gather(rows, part, from).unsqueeze(1),
                                values.gather(rows, part, from).unsqueeze(1), options);
        });
  }
  PagedBuffer keys, values;
};

// Every order of chunks and single tokens gives what each whole sequence gives by itself.
void expect_equal_to_whole(const Sequences& s, const AttentionOptions& options, double limit) {
  const std::vector<std::vector<Part>> steps = {
      {{0, 0, 1}, {2, 0, 5}},  // the shortest prompt, and a chunk that ends in a block
      {{2, 5, 1}, {1, 0, 3}},  // one more token beside another prompt
      {{1, 3, 1}, {2, 6, 3}},  // a chunk behind a cache
      {{1, 4, 1}},             // into the second block
      {{1, 5, 2}},
  };
  Cache cache;
  std::vector<int64_t> seen(3, 0);
  for (const std::vector<Part>& step : steps) {
    const at::Tensor y = cache.step(s, step, options);
    int64_t row = 0;
    for (const Part& part : step) {
      const at::Tensor whole =
          core_attention(s.q[part.sequence], s.k[part.sequence], s.v[part.sequence], options)
              .narrow(0, part.first, part.count);
      const double off = (y.narrow(0, row, part.count) - whole).abs().max().item<double>();
      EXPECT_LT(off, limit) << "sequence " << part.sequence << " at " << part.first;
      EXPECT_EQ(part.first, seen[part.sequence]) << "the test skips positions";
      seen[part.sequence] += part.count;
      row += part.count;
    }
  }
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 7, 9}));
}

TEST(PagedAttention, EqualsAttentionOverWholeSequences) {
  for (const auto& [heads, groups, d, v] :
       {std::array<int64_t, 4>{4, 4, 8, 8}, {4, 2, 16, 16}, {6, 1, 5, 3}, {2, 2, 3, 7}}) {
    for (const double softcap : {0.0, 2.0}) {
      for (const int64_t window : {-1, 2, 100}) {
        SCOPED_TRACE(cat(heads, " heads, ", groups, " groups, ", d, " and ", v, " features, cap ",
                         softcap, ", window ", window));
        AttentionOptions options;
        options.scale = 0.7;
        options.softcap = softcap;
        options.window_left = window;
        expect_equal_to_whole(Sequences(heads, groups, d, v, at::kDouble), options, 1e-13);
      }
    }
  }
}

TEST(PagedAttention, SinksAreSummedByEveryRow) {
  AttentionOptions options;
  options.scale = 0.7;
  options.window_left = 3;
  options.sinks = at::tensor({0.5, -1.0, 2.0, 0.0}, at::kDouble);
  expect_equal_to_whole(Sequences(4, 2, 16, 16, at::kDouble), options, 1e-13);
}

TEST(PagedAttention, NarrowTypesRoundTheResultAlone) {
  AttentionOptions options;
  options.backend = AttentionBackend::kUnfused;
  expect_equal_to_whole(Sequences(4, 2, 16, 16, at::kFloat), options, 1e-6);
  expect_equal_to_whole(Sequences(4, 2, 16, 16, at::kBFloat16), options, 0.02);
}

TEST(PagedAttention, ValuesMayBePartOfTheKeys) {
  at::manual_seed(2);
  const at::Tensor latents = at::randn({1, 6, 10}, at::kDouble),
                   q = at::randn({1, 3, 10}, at::kDouble);
  const PagedRows rows({{5, 1, {0}}}, 1, 6, at::kCPU);
  PagedBuffer cache;
  cache.write(PagedRows({{0, 6, {0}}}, 1, 6, at::kCPU), latents[0].unsqueeze(1));
  const at::Tensor keys = cache.view().pool;
  const at::Tensor expected =
      core_attention(q.unsqueeze(1), latents[0].unsqueeze(1).unsqueeze(1),
                     latents[0].narrow(1, 0, 6).unsqueeze(1).unsqueeze(1), {});
  EXPECT_LT((paged_attention(q, {keys}, {keys.narrow(3, 0, 6)}, rows, {}) - expected.squeeze(1))
                .abs()
                .max()
                .item<double>(),
            1e-13);
}

TEST(PagedBuffer, GrowsWithItsPool) {
  PagedBuffer buffer;
  EXPECT_EQ(buffer.bytes(), 0);
  const at::Tensor first = at::arange(6, at::kDouble).view({3, 1, 2}), second = first + 100;
  buffer.write(PagedRows({{0, 3, {1, 0}}}, 2, 2, at::kCPU), first);
  EXPECT_EQ(buffer.bytes(), 2 * 2 * 2 * 8);
  const PagedRows more({{0, 3, {4, 2}}}, 5, 2, at::kCPU);
  buffer.write(more, second);
  EXPECT_EQ(buffer.bytes(), 5 * 2 * 2 * 8);
  EXPECT_TRUE(at::equal(buffer.gather(more, more.parts()[0]), second));
  EXPECT_TRUE(at::equal(buffer.gather(more, {0, 3, {1, 0}}), first)) << "kept";
  buffer.clear();
  EXPECT_EQ(buffer.bytes(), 0);
}

// Blocks that no layer reads any more are not there: what was in them is NaN, and their entries are
// negative.
TEST(PagedAttention, NeedsNoBlocksBeforeTheWindow) {
  const Sequences s(4, 2, 8, 8, at::kDouble);
  AttentionOptions options;
  options.window_left = 2;
  for (const int64_t count : {1, 2, 5}) {
    PagedBuffer keys, values;
    const PagedRows all({{0, 9, {0, 10, 5}}}, kBlocks, kBlockSize, at::kCPU);
    keys.write(all, s.k[2].squeeze(1));
    values.write(all, s.v[2].squeeze(1));
    const int64_t first = 9 - count, dropped = (first - 2) / kBlockSize;
    std::vector<int32_t> blocks = {0, 10, 5};
    for (int64_t i = 0; i < dropped; ++i) {
      keys.fill_with_nan({blocks[static_cast<size_t>(i)]});
      values.fill_with_nan({blocks[static_cast<size_t>(i)]});
      blocks[static_cast<size_t>(i)] = -1;
    }
    EXPECT_EQ(dropped, count < 4 ? 1 : 0);
    const PagedRows rows({{first, count, blocks}}, kBlocks, kBlockSize, at::kCPU);
    const at::Tensor q = s.q[2].narrow(0, first, count);
    const int64_t from = first_seen(rows.parts()[0], options);
    const at::Tensor y =
        count == 1
            ? paged_attention(q.squeeze(1), keys.view(), values.view(), rows, options)
            : core_attention(q, keys.gather(rows, rows.parts()[0], from).unsqueeze(1),
                             values.gather(rows, rows.parts()[0], from).unsqueeze(1), options);
    const at::Tensor whole =
        core_attention(s.q[2], s.k[2], s.v[2], options).narrow(0, first, count);
    EXPECT_LT((y.view_as(whole) - whole).abs().max().item<double>(), 1e-13) << count;
  }
}

// In FP8 each number is rounded to three bits of mantissa; attention computes with what is held.
TEST(PagedAttention, ReadsFp8WithAScalePerHead) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    Sequences s(4, 2, 16, 16, at::kDouble);
    for (at::Tensor* all : {&s.k[2], &s.v[2]}) {
      all->select(2, 1).mul_(300.0);
      all->copy_(all->to(type));
    }
    s.q[2].select(2, 2).mul_(0.01);
    s.q[2].select(2, 3).mul_(0.01);
    PagedBuffer keys, values;
    const PagedRows all({{0, 8, {0, 10}}}, kBlocks, kBlockSize, at::kCPU);
    for (auto [buffer, of] : {std::pair(&keys, &s.k[2]), {&values, &s.v[2]}}) {
      buffer->measure();
      buffer->write(all, of->narrow(0, 0, 8).squeeze(1).to(type));
      const at::Tensor amax = of->narrow(0, 0, 8).abs().amax(at::IntArrayRef{0, 1, 3});
      buffer->quantize(2.0);
      EXPECT_LT((buffer->scale().to(at::kDouble) / (amax / 224.0) - 1.0).abs().max().item<double>(),
                1e-6);
      EXPECT_EQ(buffer->bytes(), 0) << "what was measured is not kept";
      buffer->write(all, of->narrow(0, 0, 8).squeeze(1).to(type));
      EXPECT_EQ(buffer->bytes(), kBlocks * kBlockSize * 2 * 16);
      const at::Tensor held = buffer->gather(all, all.parts()[0]).unsqueeze(1);
      EXPECT_EQ(held.scalar_type(), type);
      const at::Tensor error = (held.to(at::kDouble) - of->narrow(0, 0, 8)).abs();
      EXPECT_LT((error / of->narrow(0, 0, 8).abs().clamp_min(1.0)).max().item<double>(), 0.07);
      EXPECT_GT(error.max().item<double>(), 0.01);
      of->narrow(0, 0, 8).copy_(held);  // what attention sees
    }
    const PagedRows rows({{7, 1, {0, 10}}}, kBlocks, kBlockSize, at::kCPU);
    const at::Tensor q = s.q[2].narrow(0, 7, 1).to(type);
    const at::Tensor y = paged_attention(q.squeeze(1), keys.view(), values.view(), rows, {});
    const at::Tensor expected =
        core_attention(q.to(at::kDouble), s.k[2].narrow(0, 0, 8), s.v[2].narrow(0, 0, 8), {})
            .squeeze(1);
    const at::Tensor off = (y.to(at::kDouble) - expected).abs() / expected.abs().amax(-1, true);
    // What is expected has its keys rounded to bf16.
    EXPECT_LT(off.max().item<double>(), type == at::kBFloat16 ? 0.03 : 1e-6);
    keys.fill_with_nan({10});
    EXPECT_TRUE(keys.gather(all, all.parts()[0]).narrow(0, 4, 4).isnan().all().item<bool>());
  }
}

TEST(PagedBuffer, SaturatesBeyondTheRangeOfFp8) {
  PagedBuffer buffer;
  const PagedRows rows({{0, 2, {0}}}, 1, 2, at::kCPU);
  buffer.measure();
  buffer.write(rows, at::tensor({1.0f, -3.0f}).view({2, 1, 1}));
  buffer.quantize(1.0);
  buffer.write(rows, at::tensor({9.0f, -1e30f}).view({2, 1, 1}));
  EXPECT_TRUE(
      at::allclose(buffer.gather(rows, rows.parts()[0]).flatten(), at::tensor({3.0f, -3.0f})));
}

TEST(PagedRows, SayWhereTokensLie) {
  const PagedRows rows({{4, 1, {7, 2}}, {2, 3, {1, 3}}}, 8, 4, at::kCPU);
  const auto expect = [](const at::Tensor& found, std::vector<int64_t> wanted) {
    EXPECT_TRUE(at::equal(found.to(at::kLong).flatten(), at::tensor(wanted, at::kLong))) << found;
  };
  EXPECT_EQ(rows.rows(), 4);
  EXPECT_EQ(rows.single(), 1);
  expect(rows.slots, {8, 6, 7, 12});
  expect(rows.positions, {4, 2, 3, 4});
  expect(rows.last, {4, 4, 4, 4});
  expect(rows.last_rows, {0, 3});
  expect(rows.lengths, {5});
  expect(rows.block_table, {7, 2});
  const PagedRows known({{4, 1, {7, 2}}, {0, 2, {1, 3}, 6}}, 8, 4, at::kCPU);
  expect(known.last, {4, 5, 5});
  EXPECT_THROW(PagedRows({{0, 2, {0}}, {0, 1, {1}}}, 2, 4, at::kCPU), InternalError)
      << "parts of one token come first";
  EXPECT_THROW(PagedRows({{0, 5, {0}}}, 2, 4, at::kCPU), InternalError) << "too few blocks";
  EXPECT_THROW(PagedRows({{0, 2, {2}}}, 2, 4, at::kCPU), InternalError) << "no such block";
}

}  // namespace
}  // namespace megatron
