// BERT: what is masked, the model against its formulas, and every layout against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/masked_dataset.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"

namespace megatron {
namespace {

using Ids = std::vector<int64_t>;

constexpr int64_t kVocab = 40, kSequence = 16;
constexpr MaskedDatasetConfig kData = {.sequence_length = kSequence,
                                       .seed = 3,
                                       .mask_prob = 0.25,
                                       .vocab_size = kVocab,
                                       .cls = 37,
                                       .sep = 38,
                                       .mask = 39};

TEST(MaskedDataset, ASampleIsTwoHalvesWithMaskedTokens) {
  const MaskedDataset dataset(mock_windows(kData), "\"mock\"", 200, kData);
  EXPECT_EQ(dataset.columns().text(),
            "tokens int64 [16], types int64 [16], labels int64 [16], loss_mask float32 [16], "
            "is_random int64 [1], num_masked float32 [1]");
  std::map<int64_t, int> swapped, became;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const Sample sample = dataset.sample(i);
    Ids text = sample.get<int64_t>("tokens"), labels = sample.get<int64_t>("labels");
    const std::vector<float> mask = sample.get<float>("loss_mask");
    float masked = 0;
    for (size_t k = 0; k < text.size(); ++k) {
      EXPECT_EQ(mask[k], labels[k] == -1 ? 0.0F : 1.0F);
      masked += mask[k];
      if (labels[k] == -1) continue;
      ++became[text[k] == kData.mask ? 0 : text[k] == labels[k] ? 1 : 2];
      text[k] = labels[k];  // as it was
    }
    EXPECT_EQ(masked, 4.0F);
    EXPECT_EQ(sample.get<float>("num_masked")[0], masked);
    const Ids types = sample.get<int64_t>("types");
    const auto first =
        static_cast<size_t>(std::find(types.begin(), types.end(), 1) - types.begin());
    ASSERT_LT(first, text.size());
    EXPECT_EQ((Ids{text[0], text[first - 1], text.back()}), (Ids{37, 38, 38}));
    // The mock text counts; it goes on from A to B, or from B to A.
    const int64_t order = sample.get<int64_t>("is_random")[0];
    const int64_t end = order == 0 ? text[first - 2] : text[text.size() - 2];
    const int64_t begin = order == 0 ? text[first] : text[1];
    EXPECT_EQ(begin, (end + 1) % 37);
    ++swapped[order];
  }
  EXPECT_NEAR(swapped[1], 100, 30);
  EXPECT_NEAR(became[0], 640, 60);
  EXPECT_NEAR(became[1], 82, 40);
}

TEST(MaskedDataset, WindowsLieWithinSequences) {
  const std::string prefix = testing::TempDir() + "/masked";
  IndexedDatasetBuilder builder(prefix, IndexedType::kUInt16);
  Ids all(40);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  for (const int64_t length : {30, 12, 13}) {
    builder.add_sequence(Ids(all.begin(), all.begin() + length));
    builder.end_document();
  }
  builder.finish();
  const auto file = std::make_shared<const IndexedDataset>(prefix);
  const Windows windows = windows_of(file, 0, 3, kData);
  ASSERT_EQ(windows.count, 3);  // 13 tokens each: two, none, one
  EXPECT_EQ(windows.read(1), Ids(all.begin() + 13, all.begin() + 26));
  EXPECT_EQ(windows.read(2), Ids(all.begin(), all.begin() + 13));
  EXPECT_EQ(windows_of(file, 1, 2, kData).count, 0);
  EXPECT_THROW(MaskedDataset(windows_of(file, 1, 2, kData), "\"file\"", 1, kData), Error);
}

struct Built {
  explicit Built(bool binary_head = true) {
    TransformerConfig& t = config.transformer;
    config.type = "bert";
    t.num_layers = 2;
    t.hidden_size = 12;
    t.num_attention_heads = 3;
    t.seq_length = t.max_position_embeddings = kSequence;
    t.init_method_std = 0.5;
    t.hidden_dropout = t.attention_dropout = 0;
    t.finalize();
    config.vocab_size = config.padded_vocab_size = kVocab;
    config.own = OwnConfig(BertConfig());
    config.own.as<BertConfig>()->bert_binary_head = binary_head;
    model = make_model(config, groups);
    store.emplace(*model, at::kDouble, at::kCPU, false);
    initialize_parameters(*model, 5, groups);
    model->visit([&](const std::string& name, Parameter& parameter) {
      if (parameter.value.dim() == 1) parameter.value.add_(at::randn_like(parameter.value) * 0.1);
      values[name] = parameter.value;
    });
    const MaskedDataset dataset(mock_windows(kData), "\"mock\"", 3, kData);
    const auto stack = [&](const char* name, auto element) {
      std::vector<at::Tensor> rows;
      for (int64_t i = 0; i < 3; ++i)
        rows.push_back(at::tensor(dataset.sample(i).get<decltype(element)>(name)));
      batch.set(name, at::stack(rows));
    };
    for (const char* name : {"tokens", "types", "labels", "is_random"}) stack(name, int64_t{});
    for (const char* name : {"loss_mask", "num_masked"}) stack(name, float{});
    context.place = {at::arange(3), at::arange(kSequence)};
  }

  at::Tensor hidden() { return model->hidden(batch, {}, context).front(); }
  at::Tensor linear(const at::Tensor& x, const std::string& name) {
    return at::linear(x, values.at(name + ".weight"), values.at(name + ".bias"));
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name) {
    return at::layer_norm(x, {12}, values.at(name + "weight"), values.at(name + "bias"), 1e-5);
  }

  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  ModelConfig config;
  std::unique_ptr<Model> model;
  std::optional<PlainParameterStore> store;
  std::map<std::string, at::Tensor> values;
  Batch batch;
  ForwardContext context;
};

// The formulas of bert_model.h, written out.
TEST(Bert, ComputesItsFormulas) {
  at::manual_seed(1);
  Built b;
  at::Tensor x = at::embedding(b.values.at("embedding.word_embeddings.weight"), b.batch["tokens"]) +
                 b.values.at("embedding.position_embeddings.weight") +
                 at::embedding(b.values.at("embedding.tokentype_embeddings.weight"),
                               b.batch["types"]);  // [b, s, h]
  for (const char* layer : {"encoder.layers.0.", "encoder.layers.1."}) {
    const std::string in = cat(layer, "self_attention."), mlp = cat(layer, "mlp.");
    const auto qkv = b.linear(b.norm(x, in + "linear_qkv.layer_norm_"), in + "linear_qkv")
                         .view({3, kSequence, 3, 12})
                         .transpose(1, 2)
                         .chunk(3, -1);  // [b, heads, s, d]
    const at::Tensor scores = at::matmul(qkv[0], qkv[1].transpose(2, 3)) / std::sqrt(4.0);
    const at::Tensor mixed =
        at::matmul(scores.softmax(-1), qkv[2]);  // every token sees every other
    x = x + b.linear(mixed.transpose(1, 2).reshape({3, kSequence, 12}), in + "linear_proj");
    const at::Tensor f = b.linear(b.norm(x, mlp + "linear_fc1.layer_norm_"), mlp + "linear_fc1");
    x = x + b.linear(at::gelu(f, "tanh"), mlp + "linear_fc2");
  }
  x = b.norm(x, "encoder.final_layernorm.");
  const at::Tensor hidden = b.hidden();
  EXPECT_TRUE(at::allclose(hidden, x.transpose(0, 1), 1e-9, 1e-10));

  const at::Tensor y = b.norm(at::gelu(b.linear(x, "lm_head.dense")), "lm_head.layer_norm.");
  const at::Tensor logits = at::matmul(y, b.values.at("embedding.word_embeddings.weight").t()) +
                            b.values.at("output_layer.bias");
  EXPECT_TRUE(at::allclose(b.model->logits(hidden), logits.transpose(0, 1), 1e-9, 1e-10));
  const at::Tensor masked = b.batch["labels"] >= 0;
  const at::Tensor expected = at::cross_entropy_loss(
      logits.index({masked}), b.batch["labels"].index({masked}), {}, at::Reduction::Sum);
  const at::Tensor order =
      b.linear(at::tanh(b.linear(x.select(1, 0), "pooler.dense")), "binary_head");
  const at::Tensor of_order =
      at::cross_entropy_loss(order, b.batch["is_random"].squeeze(1), {}, at::Reduction::Sum);

  RecomputeTape tape;
  const at::Tensor totals = at::zeros({1, 2}, at::kDouble);
  AuxiliaryLosses losses(
      {{"sop loss"},
       totals,
       true,
       [](const at::Tensor& sum, const at::Tensor&, LossRows) { return at::ones_like(sum); }},
      tape);
  b.context.auxiliary_losses = &losses;
  const Loss loss = b.model->loss({hidden}, b.batch, b.context);
  EXPECT_NEAR(loss.sum.item<double>(), expected.item<double>(), 1e-9);
  EXPECT_EQ(loss.weight.item<double>(), 12.0);
  EXPECT_NEAR(totals[0][0].item<double>(), 4 * of_order.item<double>(), 1e-9);
  EXPECT_EQ(totals[0][1].item<double>(), 12.0);
}

TEST(Bert, ReadsTokenTypesAndLaterTokens) {
  Built b;
  const at::Tensor before = b.hidden();
  b.batch.set("types", 1 - b.batch["types"]);
  EXPECT_FALSE(at::allclose(b.hidden(), before));
  b.batch.set("types", 1 - b.batch["types"]);
  EXPECT_TRUE(at::equal(b.hidden(), before));
  at::Tensor tokens = b.batch["tokens"].clone();
  tokens.select(1, kSequence - 1).fill_(7);
  b.batch.set("tokens", tokens);
  EXPECT_FALSE(at::allclose(b.hidden()[0], before[0])) << "the first token sees the last one";
}

TEST(Bert, WithoutTheBinaryHeadThereAreNoTokenTypes) {
  Built b(/*binary_head=*/false);
  const at::Tensor before = b.hidden();
  b.batch.set("types", 1 - b.batch["types"]);
  EXPECT_TRUE(at::equal(b.hidden(), before));
  EXPECT_FALSE(b.values.contains("embedding.tokentype_embeddings.weight"));
  EXPECT_FALSE(b.values.contains("pooler.dense.weight"));
  EXPECT_TRUE(b.model->auxiliary_losses().empty());
}

TEST(Bert, RefusesWhatIsNotBuilt) {
  const ParallelGroups groups;
  const auto refused = [&](const char* flag, const auto& change) {
    ModelConfig config;
    config.type = "bert";
    change(config, config.transformer);
    try {
      make_model(config, groups);
      ADD_FAILURE() << flag << " is accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), cat(flag, " is not built for BERT"));
    }
  };
  refused("--pipeline-vocab-parallel", [](auto& c, auto&) { c.pipeline_vocab_parallel = true; });
  refused("--untie-embeddings-and-output-weights",
          [](auto&, auto& t) { t.untie_embeddings_and_output_weights = true; });
  refused("--cross-entropy-fusion-impl linear",
          [](auto&, auto& t) { t.cross_entropy_fusion_impl = CrossEntropyFusion::kLinear; });
  refused("--final-logit-softcapping", [](auto&, auto& t) { t.final_logit_softcapping = 30; });
  refused("--lora-rank", [](auto&, auto& t) { t.lora_rank = 4; });
}

constexpr const char* kRun =
    "--task bert --mock-data --tokenizer-type NullTokenizer --vocab-size 101 "
    "--make-vocab-size-divisible-by 8 --num-workers 0 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 0 --device cpu --lr 1e-2 --train-iters 10 --adam-eps 1e-3 --num-layers 4 "
    "--init-method-std 0.2 ";
constexpr const char* kSmall =
    "--hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 24 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 ";
constexpr const char* kMeasured =
    "--hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout 0 ";

TEST(Bert, PlansTheScoresOfEveryPairOfTokens) {
  const Arguments arguments = parse_run(cat(kRun, kSmall), 1);
  const LayoutPlan plan = make_layout_plan(arguments, {101, 104}, /*on_gpu=*/false,
                                           find_task(arguments).model_provider);
  EXPECT_EQ(plan.layer_cost(1).first.score_products, 2.0 * 24 * 48);
}

class EncoderLayouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(EncoderLayouts, TrainWhatOneRankTrains) {
  EXPECT_EQ(differences_in_fp64(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(EncoderLayouts, AreProved) {
  EXPECT_EQ(unproved(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(EncoderLayouts, NeedTheMemoryOfThePlan) {
  for (const RankMemory& rank :
       memory_of_ranks(cat(kRun, kMeasured, GetParam().flags), GetParam().ranks))
    EXPECT_NEAR(double(rank.planned) / double(rank.metered), 1.0, 0.01)
        << rank.planned << " and " << rank.metered;
}

INSTANTIATE_TEST_SUITE_P(Proofs, EncoderLayouts, testing::ValuesIn(proved_layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
