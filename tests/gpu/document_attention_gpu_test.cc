// Attention within documents by ranges of rows on CUDA, beside a mask of the others in fp64 on the
// CPU; steps of a GPT on packed documents with and without graphs.
#include <gtest/gtest.h>

#include <cmath>

#include "megatron/base/format.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tests/gpu/timing.h"
#include "tests/kernels/cases.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

// Documents of these lengths, one after another in each sample.
struct Documents {
  Documents(const std::vector<std::vector<int64_t>>& lengths, int64_t s) {
    const auto b = static_cast<int64_t>(lengths.size());
    std::vector<DocumentPlace> places;
    ids = at::zeros({b, s}, at::kLong);
    for (int64_t i = 0; i < b; ++i) {
      int64_t begin = 0, id = 0;
      for (const int64_t length : lengths[static_cast<size_t>(i)]) {
        places.push_back({i, begin, length});
        ids[i].narrow(0, begin, length).fill_(id++);
        begin += length;
      }
    }
    auto all = std::make_shared<UnpaddedRows>(make_document_rows(places, s, b));
    all->offsets = all->offsets.to(kGpu);
    all->counts = all->counts.to(kGpu);
    rows = std::move(all);
    const at::Tensor positions = at::arange(s);
    mask = document_mask(ids, positions, positions);
  }
  at::Tensor ids, mask;
  std::shared_ptr<const UnpaddedRows> rows;
};

struct DocumentsCase {
  const char* name;
  int64_t n = 4, g = 4, d = 64;
  int64_t window = -1;
  bool recompute = false;
  bool rotary = false;
};

void PrintTo(const DocumentsCase& c, std::ostream* out) { *out << c.name; }

class GpuDocuments : public testing::TestWithParam<std::tuple<DocumentsCase, at::ScalarType>> {};

TEST_P(GpuDocuments, MatchAMaskInFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const auto& [c, type] = GetParam();
  const int64_t s = 640, b = 3, r = c.n / c.g;
  const Documents documents({{640}, {1, 63, 200, 376}, {7, 513, 1, 1, 118}}, s);
  ASSERT_EQ(documents.rows->samples, 16);  // six without rows
  ASSERT_EQ(documents.rows->length, 640);
  at::manual_seed(7);
  const at::Tensor packed = at::randn({s, b, c.g * (r + 2) * c.d}).to(type),
                   dout = at::randn({s, b, c.n * c.d}).to(type);
  const PackedHeads heads{c.g, r, c.d};
  AttentionOptions options;
  options.scale = 1.0 / std::sqrt(static_cast<double>(c.d));
  options.window_left = c.window;
  options.recompute = c.recompute;
  RotaryAngles angles;
  if (c.rotary) {
    const at::Tensor angle = at::randn({s, b, c.d / 2});
    angles = {angle.cos(), angle.sin(), false};
  }

  AttentionOptions masked = options;
  masked.mask = documents.mask;
  const RotaryAngles wide{c.rotary ? angles.cos.to(at::kDouble) : at::Tensor(),
                          c.rotary ? angles.sin.to(at::kDouble) : at::Tensor(), false};
  at::Tensor exact_in = packed.to(at::kDouble).requires_grad_();
  const at::Tensor exact = packed_attention(exact_in.clone(), heads, wide, masked);
  exact.backward(dout.to(at::kDouble));

  if (c.rotary) angles = {angles.cos.to(kGpu), angles.sin.to(kGpu), false};
  const auto run = [&] {
    at::Tensor in = packed.to(kGpu).requires_grad_();
    const std::optional<at::Tensor> out =
        packed_attention_of_documents(in.clone(), heads, angles, {documents.rows}, options);
    MEGATRON_CHECK(out.has_value(), "no kernel");
    out->backward(dout.to(kGpu));
    return Tensors{out->detach().cpu(), in.grad().cpu()};
  };
  const Tensors got = run(), again = run();
  const double tolerance = type == at::kHalf ? 4e-3 : 2e-2;
  EXPECT_LT(relative_error(got[0], exact.detach()), tolerance);
  EXPECT_LT(relative_error(got[1], exact_in.grad()), tolerance);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], again[i])) << i;

  // The same of separate tensors
  if (c.rotary) return;
  const at::Tensor all = packed.to(kGpu).view({s, b, c.g, r + 2, c.d});
  const at::Tensor q = all.narrow(3, 0, r).reshape({s, b, c.n, c.d}), k = all.select(3, r),
                   v = all.select(3, r + 1);
  const std::optional<at::Tensor> out = attention_of_documents(q, k, v, {documents.rows}, options);
  ASSERT_TRUE(out.has_value());
  EXPECT_TRUE(at::equal(out->reshape({s, b, c.n * c.d}).cpu(), got[0]));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GpuDocuments,
    testing::Combine(testing::ValuesIn(std::vector<DocumentsCase>{
                         {.name = "plain"},
                         {.name = "grouped", .n = 8, .g = 2, .d = 128},
                         {.name = "rotary", .n = 8, .g = 2, .d = 128, .rotary = true},
                         {.name = "window", .n = 8, .g = 4, .window = 100},
                         {.name = "recompute", .recompute = true}}),
                     testing::Values(at::kBFloat16, at::kHalf)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" +
             c10::toString(std::get<1>(info.param));
    });

TEST(GpuDocumentRows, WhatNoKernelComputesIsLeftToAMask) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const Documents documents({{100, 28}}, 128);
  const at::Tensor x = at::randn({128, 1, 4, 64}).to(kGpu, at::kBFloat16);
  AttentionOptions dropped;
  dropped.dropout = 0.1;
  EXPECT_FALSE(attention_of_documents(x, x, x, {documents.rows}, dropped).has_value());
  const at::Tensor wide = x.to(at::kFloat);
  EXPECT_FALSE(attention_of_documents(wide, wide, wide, {documents.rows}, {}).has_value());
}

// Of latent attention, whose values are narrower than its keys.
TEST(GpuDocumentRows, ValuesMayBeNarrowerThanKeys) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const int64_t s = 512, n = 4;
  const Documents documents({{100, 412}, {512}}, s);
  at::manual_seed(9);
  const at::Tensor q = at::randn({s, 2, n, 192}).to(at::kBFloat16),
                   k = at::randn({s, 2, n, 192}).to(at::kBFloat16),
                   v = at::randn({s, 2, n, 128}).to(at::kBFloat16);
  AttentionOptions options;
  options.scale = 0.07;
  AttentionOptions masked = options;
  masked.mask = documents.mask;
  const at::Tensor exact =
      core_attention(q.to(at::kDouble), k.to(at::kDouble), v.to(at::kDouble), masked);
  const std::optional<at::Tensor> out =
      attention_of_documents(q.to(kGpu), k.to(kGpu), v.to(kGpu), {documents.rows}, options);
  ASSERT_TRUE(out.has_value());
  EXPECT_LT(relative_error(out->cpu(), exact), 2e-2);
}

// Losses of six steps, and the weights after them.
Tensors train(const std::string& more) {
  const Arguments arguments = parse_line(
      cat("pretrain --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 512 "
          "--position-embedding-type rope --mock-data --reset-attention-mask "
          "--tokenizer-type NullTokenizer --vocab-size 500 --micro-batch-size 2 "
          "--global-batch-size 8 --train-iters 8 --lr 1e-3 --bf16 --num-workers 0 --device cuda "
          "--attention-dropout 0 --hidden-dropout 0 ",
          more),
      1);
  const PretrainTask task = find_task(arguments);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
  const ParallelGroups groups;
  const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);
  const std::unique_ptr<DataLoader> loader =
      make_train_loader(arguments, groups, datasets.train, /*consumed=*/0, kGpu);
  BatchMaker batches(kGpu, groups.cp, 0);
  TrainedModel trained = build_model(task, arguments, vocabulary_of(arguments, *tokenizer), groups,
                                     at::kBFloat16, kGpu, StartPoint{});
  Timers timers(0);
  Tensors result;
  for (int step = 0; step < 6; ++step)
    result.push_back(train_step(
                         trained, task, step_options(arguments, 0),
                         [&] { return batches.make(loader->next()); }, timers)
                         .loss.cpu());
  result.push_back(trained.chunks.front().store->flat_values().cpu());
  return result;
}

TEST(GpuDocumentRows, GraphsLeaveTheBitsOfEagerStepsAndLossesThoseOfAMask) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const Tensors eager = train(""),
                graphs = train("--cuda-graph-impl local --cuda-graph-warmup-steps 1"),
                masked = train("--attention-backend unfused");
  for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(at::equal(eager[i], graphs[i])) << i;
  for (size_t i = 0; i + 1 < eager.size(); ++i)  // sums over tokens and their weights
    EXPECT_LT(relative_error(eager[i], masked[i]), 1e-4) << i;
}

// Documents of a packed sequence beside a mask of the others, and beside one causal sequence.
TEST(GpuDocumentRows, Rates) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const int64_t s = 4096, b = 2;
  const Documents documents({{1500, 300, 800, 1496}, {96, 2000, 64, 500, 436, 1000}}, s);
  const PackedHeads heads{8, 4, 128};
  const at::Tensor packed = at::randn({s, b, 8 * 6 * 128}).to(kGpu, at::kBFloat16),
                   dout = at::randn({s, b, 32 * 128}).to(kGpu, at::kBFloat16);
  AttentionOptions options;
  options.scale = 0.088;
  AttentionOptions masked = options;
  masked.mask = documents.mask.to(kGpu);
  const auto both = [&](const std::function<at::Tensor(const at::Tensor&)>& attend) {
    return [&, attend] {
      const at::Tensor in = packed.detach().requires_grad_();
      attend(in).backward(dout);
    };
  };
  const std::vector<double> ms = milliseconds(
      dout, {both([&](const at::Tensor& in) {
               return *packed_attention_of_documents(in, heads, {}, {documents.rows}, options);
             }),
             both([&](const at::Tensor& in) { return packed_attention(in, heads, {}, masked); }),
             both([&](const at::Tensor& in) { return packed_attention(in, heads, {}, options); })});
  std::printf("documents: %.2f ms, by a mask %.2f, one causal sequence %.2f\n", ms[0], ms[1],
              ms[2]);
  EXPECT_LT(ms[0], ms[1]);
}

}  // namespace
}  // namespace megatron
