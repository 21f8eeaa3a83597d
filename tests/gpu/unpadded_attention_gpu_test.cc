// Attention over ranges of rows on CUDA, by kernels and with padding, against fp64 on the CPU,
// where each sample is computed by itself.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "megatron/base/format.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/kernels/cases.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

using Rows = std::shared_ptr<const UnpaddedRows>;

// Samples of `length` tokens with texts of these lengths, the second of them with a hole if asked.
Rows texts_of(const std::vector<int64_t>& lengths, int64_t length, bool hole = false) {
  std::vector<uint8_t> mask;
  for (size_t i = 0; i < lengths.size(); ++i)
    for (int64_t j = 0; j < length; ++j)
      mask.push_back(j < lengths[i] && !(hole && i == 1 && j == 2) ? 1 : 0);
  std::vector<int64_t> samples(lengths.size());
  std::iota(samples.begin(), samples.end(), 5);
  return std::make_shared<const UnpaddedRows>(make_unpadded_rows({mask}, samples, 1));
}

Rows on_gpu(const Rows& rows) {
  if (rows == nullptr) return nullptr;
  auto copy = std::make_shared<UnpaddedRows>(*rows);
  for (at::Tensor* tensor : copy->tensors()) *tensor = tensor->to(kGpu);
  return copy;
}

AttendedRows on_gpu(const AttendedRows& rows) { return {on_gpu(rows.queries), on_gpu(rows.keys)}; }

using Attend =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttendedRows& rows, const AttentionOptions& options)>;

// out, dq, dk, dv and, with a bias, its gradient on the CPU.
Tensors attend(const Attend& function, Tensors qkv, const at::Tensor& dout,
               const AttendedRows& rows, AttentionOptions options) {
  for (at::Tensor& t : qkv) t = t.detach().requires_grad_();
  if (options.distance_bias.defined())
    options.distance_bias = options.distance_bias.detach().requires_grad_();
  const at::Tensor out = function(qkv[0], qkv[1], qkv[2], rows, options);
  out.backward(dout);
  Tensors all = {out.detach().cpu(), qkv[0].grad().cpu(), qkv[1].grad().cpu(), qkv[2].grad().cpu()};
  if (options.distance_bias.defined()) all.push_back(options.distance_bias.grad().cpu());
  return all;
}

struct RangesCase {
  const char* name;
  int64_t n = 4, g = 4, d = 64;
  bool causal = false;
  bool cross = false;
  bool hole = false;
  bool bias = false;
  int64_t window = -1;     // on both sides, in texts of up to 1536 tokens
  bool few_plans = false;  // five ranges of up to 200 rows, as eight of up to 256
  bool recompute = false;
};

void PrintTo(const RangesCase& c, std::ostream* out) { *out << c.name; }

class GpuUnpaddedAttention : public testing::TestWithParam<std::tuple<RangesCase, at::ScalarType>> {
};

TEST_P(GpuUnpaddedAttention, MatchesFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const auto& [c, type] = GetParam();
  AttendedRows rows{texts_of({200, 65, 256, 1, 130}, 256, c.hole)};
  if (c.window >= 0) rows.queries = texts_of({200, 1536, 1, 777}, 1536);
  if (c.few_plans) {
    UnpaddedRows few = *texts_of({200, 65, 130, 1, 77}, 200);
    use_few_plans(few);
    rows.queries = std::make_shared<const UnpaddedRows>(std::move(few));
  }
  if (c.cross) rows.keys = texts_of({33, 128, 1, 100, 77}, 128, c.hole);
  const int64_t r = rows.queries->rows, r_k = rows.of_keys().rows;
  const std::vector<int64_t>& lengths = rows.queries->lengths;
  ASSERT_GT(r, std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) << "no empty rows";
  at::manual_seed(3);
  const auto random = [&, type = type](int64_t count, int64_t heads) {
    return at::randn({count, 1, heads, c.d}).to(type);
  };
  const at::Tensor q = random(r, c.n), k = random(r_k, c.g), v = random(r_k, c.g);
  const at::Tensor dout = random(r, c.n);
  AttentionOptions options;
  options.causal = c.causal;
  options.scale = 1.0 / std::sqrt(static_cast<double>(c.d));
  options.recompute = c.recompute;
  options.window_left = options.window_right = c.window;
  Tensors wide;
  for (const at::Tensor& t : {q, k, v}) wide.push_back(t.to(at::kDouble));
  const at::Tensor bias =
      c.bias ? at::randn({rows.queries->length + rows.of_keys().length - 1, c.n}).t()
             : at::Tensor();  // as the layers give it
  if (c.bias) options.distance_bias = bias.to(at::kDouble);
  const Tensors exact = attend(unpadded_attention, wide, dout.to(at::kDouble), rows, options);

  if (c.bias) options.distance_bias = bias.to(kGpu);
  const AttendedRows there = on_gpu(rows);
  const Tensors qkv = {q.to(kGpu), k.to(kGpu), v.to(kGpu)};
  const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 4e-3 : 2e-2;
  const auto check = [&](const char* way, const Attend& function, const AttentionOptions& o) {
    Tensors got, again;
    try {
      got = attend(function, qkv, dout.to(kGpu), there, o);
      again = attend(function, qkv, dout.to(kGpu), there, o);
    } catch (const std::exception& error) {
      FAIL() << c.name << " " << way << " threw: " << error.what();
    }
    const char* const names[] = {"out", "dq", "dk", "dv", "dbias"};
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(relative_error(got[i], exact[i]), tolerance) << names[i] << " " << way;
      EXPECT_TRUE(at::equal(got[i], again[i])) << names[i] << " differs between two runs, " << way;
      if (i == 4) continue;
      const UnpaddedRows& of = i < 2 ? *rows.queries : rows.of_keys();
      const int64_t texts = std::accumulate(of.lengths.begin(), of.lengths.end(), int64_t{0});
      EXPECT_EQ(got[i].slice(0, texts).abs().sum().item<double>(), 0) << names[i] << " " << way;
    }
  };
  check("with padding", attention_with_padding, options);
  check("auto", unpadded_attention, options);
  if (type == at::kFloat || c.hole || c.bias) return;
  AttentionOptions by_name = options;  // an error where cuDNN does not take it
  by_name.backend = AttentionBackend::kFused;
  check("cuDNN", unpadded_attention, by_name);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GpuUnpaddedAttention,
    testing::Combine(testing::ValuesIn(std::vector<RangesCase>{
                         {.name = "bidirectional"},
                         {.name = "recompute", .recompute = true},
                         {.name = "few_plans", .few_plans = true},
                         {.name = "causal", .causal = true},
                         {.name = "cross", .cross = true},
                         {.name = "grouped", .n = 8, .g = 2, .d = 128},
                         {.name = "hole", .hole = true},
                         {.name = "cross_hole", .cross = true, .hole = true},
                         {.name = "bias", .bias = true},
                         {.name = "bias_causal", .causal = true, .bias = true},
                         {.name = "bias_wide", .d = 128, .bias = true},
                         {.name = "bias_cross", .cross = true, .bias = true},
                         {.name = "bias_hole", .hole = true, .bias = true},
                         {.name = "bias_recompute", .bias = true, .recompute = true}}),
                     testing::Values(at::kBFloat16, at::kHalf, at::kFloat)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" +
             c10::toString(std::get<1>(info.param));
    });

// As the layers give it: [q | k | v] of each head together, rotated in place.
TEST(GpuPackedRanges, AreThoseOfSeparateTensors) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const Rows rows = on_gpu(texts_of({200, 65, 256, 1, 130}, 256));
  const int64_t r = rows->rows, n = 4, d = 64;
  at::manual_seed(4);
  const at::Tensor packed = at::randn({r, 1, n * 3 * d}).to(kGpu, at::kBFloat16),
                   dout = at::randn({r, 1, n * d}).to(kGpu, at::kBFloat16);
  AttentionOptions options;
  options.causal = false;
  options.scale = 0.125;
  options.backend = AttentionBackend::kFused;
  const PackedHeads heads{n, 1, d};
  at::Tensor flat = packed.clone().requires_grad_();
  const at::Tensor out = unpadded_packed_attention(flat, heads, {}, {rows}, options);
  out.backward(dout);
  const at::Tensor all = packed.view({r, 1, n, 3, d});
  Tensors qkv;
  for (int64_t i = 0; i < 3; ++i) qkv.push_back(all.select(3, i).clone().requires_grad_());
  const at::Tensor expected = unpadded_attention(qkv[0], qkv[1], qkv[2], {rows}, options);
  expected.backward(dout.view({r, 1, n, d}));
  EXPECT_TRUE(at::equal(out.detach(), expected.detach().reshape({r, 1, n * d})));
  const at::Tensor grads =
      at::stack({qkv[0].grad(), qkv[1].grad(), qkv[2].grad()}, 3).view({r, 1, n * 3 * d});
  EXPECT_TRUE(at::equal(flat.grad(), grads));
}

// A graph reads the ranges when it is launched.
TEST(GpuPackedRanges, OfAGraphAreThoseOfItsLaunch) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const Rows first = on_gpu(texts_of({200, 65, 256, 1, 130}, 256)),
             second = on_gpu(texts_of({17, 256, 256, 90, 31}, 256));
  ASSERT_EQ(first->rows, second->rows);
  at::manual_seed(5);
  const int64_t n = 4, d = 64;
  const at::Tensor q = at::randn({first->rows, 1, n, d}).to(kGpu, at::kBFloat16);
  AttentionOptions options;
  options.causal = false;
  options.backend = AttentionBackend::kFused;
  const at::NoGradGuard no_grad;
  const Tensors expected = {unpadded_attention(q, q, q, {first}, options),
                            unpadded_attention(q, q, q, {second}, options)};
  auto changed = std::make_shared<UnpaddedRows>(*first);
  for (at::Tensor* tensor : changed->tensors()) *tensor = tensor->clone();
  DeviceGraphPool pool(kGpu);
  at::Tensor out;
  DeviceGraph graph(pool, [&] { out = unpadded_attention(q, q, q, {changed}, options); });
  for (const size_t i : {0, 1, 0}) {
    const Rows& rows = i == 0 ? first : second;
    for (size_t t = 0; t < changed->tensors().size(); ++t)
      changed->tensors()[t]->copy_(*rows->tensors()[t]);
    graph.launch();
    EXPECT_TRUE(at::equal(out, expected[i])) << i;
  }
}

// The terms of the loss of six steps, and the weights after them.
Tensors train(const std::string& model, const std::string& more, int64_t hidden = 128) {
  const Arguments arguments = parse_line(
      cat("pretrain ", model, " --hidden-size ", hidden, " --num-attention-heads ", hidden / 64,
          " --seq-length 128 --max-position-embeddings 128 --mock-data --mock-lengths 16 128 "
          "--tokenizer-type "
          "NullTokenizer --vocab-size 500 --micro-batch-size 8 --global-batch-size 24 "
          "--train-iters 8 --lr 1e-3 --bf16 --num-workers 0 --device cuda ",
          more),
      1);
  const PretrainTask task = find_task(arguments);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
  const ParallelGroups groups;
  const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);
  const std::unique_ptr<DataLoader> loader =
      make_train_loader(arguments, groups, datasets.train, /*consumed=*/0, kGpu);
  BatchMaker batches(kGpu, groups.cp, unpadded_row_multiple(arguments));
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

// Products of new numbers of rows are timed at their first use, which no capture allows.
TEST(GpuUnpaddedSteps, NumbersOfRowsMayBeNewAfterTheFirstSteps) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const std::string wide = "--task bert --num-layers 1 --hidden-dropout 0 --attention-dropout 0";
  const Tensors eager = train(wide, "", 2048),
                graphs = train(wide, "--cuda-graph-impl local --cuda-graph-warmup-steps 1", 2048);
  for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(at::equal(eager[i], graphs[i])) << i;
}

TEST(GpuUnpaddedSteps, GraphsLeaveTheBitsOfEagerStepsAndLossesThoseOfPadding) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const std::string t5 = "--task t5 --num-layers 2 --decoder-seq-length 64 ";
  for (const std::string& model :
       {std::string("--task bert --num-layers 2 --hidden-dropout 0.1 --attention-dropout 0"),
        std::string("--task bert --num-layers 2 --hidden-dropout 0.1 --attention-dropout 0.1"),
        t5 + "--hidden-dropout 0.1 --attention-dropout 0",
        t5 + "--hidden-dropout 0 --attention-dropout 0 --position-embedding-type relative"}) {
    const Tensors eager = train(model, ""), padded = train(model, "--remove-padding false"),
                  graphs = train(model, "--cuda-graph-impl local --cuda-graph-warmup-steps 2");
    for (size_t i = 0; i < eager.size(); ++i)
      EXPECT_TRUE(at::equal(eager[i], graphs[i])) << model << ", " << i;
    for (size_t i = 0; i + 1 < eager.size(); ++i)
      EXPECT_TRUE(at::allclose(eager[i], padded[i], /*rtol=*/1e-2))
          << model << ", step " << i + 1 << ":\n"
          << eager[i] << "\n"
          << padded[i];
  }
}

}  // namespace
}  // namespace megatron
