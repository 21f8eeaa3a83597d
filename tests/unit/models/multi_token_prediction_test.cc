// Multi-token prediction: shifted columns, and losses and gradients against PyTorch.
#include "megatron/models/common/multi_token_prediction.h"

#include <gtest/gtest.h>

#include <cmath>

#include "megatron/comm/parallel_groups.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

// -- columns

at::Tensor row(std::vector<int64_t> values) { return at::tensor(values, at::kLong).unsqueeze(0); }

Batch six_tokens() {
  Batch batch;
  batch.set("tokens", row({5, 6, 7, 8, 9, 10}));
  batch.set("labels", row({6, 7, 8, 9, 10, 11}));
  batch.set("loss_mask", row({1, 1, 1, 0, 1, 1}).to(at::kFloat));
  batch.place.position = at::arange(6, at::kLong);
  return batch;
}

void expect_columns(const ShiftedColumns& columns, const at::Tensor& tokens,
                    const at::Tensor& labels, const at::Tensor& mask) {
  EXPECT_TRUE(at::equal(columns.tokens, tokens)) << columns.tokens;
  EXPECT_TRUE(at::equal(columns.labels, labels)) << columns.labels;
  EXPECT_TRUE(at::equal(columns.loss_mask, mask.to(at::kFloat))) << columns.loss_mask;
}

TEST(ShiftedBatch, ShiftsAllColumnsAlike) {
  const ProcessGroup alone;
  const ShiftedBatch shifted(six_tokens(), alone);
  expect_columns(shifted.at(1), row({6, 7, 8, 9, 10, 0}), row({7, 8, 9, 10, 11, 0}),
                 row({1, 1, 0, 1, 1, 0}));
  expect_columns(shifted.at(2), row({7, 8, 9, 10, 0, 0}), row({8, 9, 10, 11, 0, 0}),
                 row({1, 0, 1, 1, 0, 0}));
  EXPECT_DOUBLE_EQ(shifted.at(1).weight_ratio.item<double>(), 5.0 / 4.0);
  EXPECT_DOUBLE_EQ(shifted.at(2).weight_ratio.item<double>(), 5.0 / 3.0);
  EXPECT_TRUE(at::equal(shifted.at(2).position_ids, row({2, 3, 4, 5, 0, 0})));
}

TEST(ShiftedBatch, StaysInsideDocuments) {
  const ProcessGroup alone;
  Batch batch = six_tokens();
  batch.document_ids = row({0, 0, 0, 1, 1, 1});
  expect_columns(ShiftedBatch(batch, alone).at(1), row({6, 7, 0, 9, 10, 0}),
                 row({7, 8, 0, 10, 11, 0}), row({1, 1, 0, 1, 1, 0}));
}

TEST(ShiftedBatch, ASequenceWithoutLaterTokensHasNoWeight) {
  const ProcessGroup alone;
  Batch batch = six_tokens();
  batch.set("loss_mask", row({1, 0, 0, 0, 0, 0}).to(at::kFloat));
  EXPECT_EQ(ShiftedBatch(batch, alone).at(1).weight_ratio.item<double>(), 0.0);
  EXPECT_EQ(ShiftedBatch(batch, alone).at(7).loss_mask.sum().item<double>(), 0.0);
}

// -- losses and gradients

struct OneStep {
  at::Tensor loss;    // [] main
  at::Tensor totals;  // [names, 2]
};

// One forward and backward of a golden's batch.
OneStep train_one_step(const Golden& golden, GPTModel& model) {
  const auto& t = golden.tensors;
  RecomputeTape tape;
  const auto names = static_cast<int64_t>(model.auxiliary_losses().size());
  const at::Tensor totals = at::zeros({names, 2}, at::kDouble);
  AuxiliaryLosses losses({.names = model.auxiliary_losses(),
                          .totals = totals,
                          .gradient = [](const at::Tensor& sum, const at::Tensor&, LossRows,
                                         std::string_view) { return at::ones_like(sum); }},
                         tape);
  ForwardContext context = context_for(t.at("tokens"), /*training=*/true);
  context.tape = &tape;
  context.auxiliary_losses = &losses;
  Batch batch;
  for (const char* column : {"tokens", "labels", "loss_mask"}) batch.set(column, t.at(column));
  batch.place = context.place;
  if (const auto documents = t.find("document_ids"); documents != t.end())
    batch.document_ids = context.document_ids = documents->second;
  const Loss loss = model.loss(model.hidden(batch, {}, context), batch, context);
  tape.backward(loss.sum);
  return {loss.sum.detach(), totals};
}

void expect_mtp_golden(const Golden& golden, at::ScalarType dtype, double rtol) {
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  PlainParameterStore store(model, dtype, at::kCPU, /*gradients=*/true);
  load_weights(model, golden, "weight/");
  const OneStep trained = train_one_step(golden, model);
  const auto& t = golden.tensors;
  expect_close(trained.loss.reshape({1}), t.at("loss"), rtol, 0.0, "loss");
  // Columns: trained sum, sum over the mask, weight, hits
  const at::Tensor& depths = t.at("depths");
  const at::Tensor losses = trained.totals.view({depths.size(0), 2, 2});
  expect_close(losses.select(1, 0), depths.narrow(1, 1, 2), rtol, 0.0, "losses of the depths");
  expect_close(losses.select(1, 1).select(1, 0), 100 * depths.select(1, 3), 1e-12, 0.0,
               "labels that are the largest");
  double all = 0.0;
  for (const auto& [name, tensor] : t)
    if (name.rfind("grad/", 0) == 0) all += std::pow(tensor.norm().item<double>(), 2);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = t.at("grad/" + name);
    expect_close(store.grad(parameter).narrow(0, 0, expected.size(0)), expected, rtol,
                 std::sqrt(all), "gradient of " + name);
  });
}

constexpr const char* kMtpGoldens = MEGATRON_SOURCE_DIR "/tests/golden/mtp";

class MultiTokenGolden : public testing::TestWithParam<std::string> {
 protected:
  Golden golden_ = read_golden(GetParam(), kMtpGoldens);
};

TEST_P(MultiTokenGolden, Fp64) { expect_mtp_golden(golden_, at::kDouble, 1e-10); }
TEST_P(MultiTokenGolden, Fp32) { expect_mtp_golden(golden_, at::kFloat, 2e-5); }

// The decoder's output passes through recomputed depths.
TEST_P(MultiTokenGolden, Recomputed) {
  golden_.config.transformer.recompute_granularity = RecomputeGranularity::kFull;
  expect_mtp_golden(golden_, at::kDouble, 1e-10);
}

TEST_P(MultiTokenGolden, SublayersInDepthsAreNotCut) {
  golden_.config.transformer.recompute_granularity = RecomputeGranularity::kSelective;
  golden_.config.transformer.recompute_modules = {"mlp", "core_attn", "layernorm"};
  expect_mtp_golden(golden_, at::kDouble, 1e-10);
}

INSTANTIATE_TEST_SUITE_P(All, MultiTokenGolden,
                         testing::Values("learned_tied", "rope_repeated_documents"),
                         [](const auto& param) { return param.param; });

// -- parameters

std::map<std::string, int> uses_of(GPTModel& model) {
  std::map<std::string, int> uses;
  model.visit([&](const std::string& name, Parameter& parameter) { uses[name] = parameter.uses; });
  return uses;
}

TEST(MultiTokenPrediction, TablesAndHeadAreUsedOncePerDepthMore) {
  const ParallelGroups groups;
  GPTModel tied(read_golden("learned_tied", kMtpGoldens).config, groups);
  EXPECT_EQ(uses_of(tied).at("embedding.word_embeddings.weight"), 2 * 2 + 2);
  EXPECT_EQ(uses_of(tied).at("embedding.position_embeddings.weight"), 2 + 1);
  EXPECT_EQ(uses_of(tied).at("mtp.layers.1.eh_proj.weight"), 1);
  GPTModel untied(read_golden("rope_repeated_documents", kMtpGoldens).config, groups);
  EXPECT_EQ(uses_of(untied).at("embedding.word_embeddings.weight"), 2 + 1);
  EXPECT_EQ(uses_of(untied).at("output_layer.weight"), 2 + 1);
  EXPECT_EQ(uses_of(untied).at("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"), 2);
  EXPECT_EQ(uses_of(untied).count("mtp.layers.1.eh_proj.weight"), 0u);
}

TEST(MultiTokenPrediction, EvaluationDoesNotComputeIt) {
  Golden golden = read_golden("learned_tied", kMtpGoldens);
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  PlainParameterStore store(model, at::kDouble, at::kCPU, /*gradients=*/false);
  load_weights(model, golden, "weight/");
  const auto& t = golden.tensors;
  const auto loss = [&] {
    const at::NoGradGuard no_grad;
    return model
        .loss(t.at("tokens"), t.at("labels"), t.at("loss_mask"),
              context_for(t.at("tokens"), /*training=*/false))
        .sum.item<double>();
  };
  const double before = loss();
  model.visit([&](const std::string& name, Parameter& parameter) {
    if (name.rfind("mtp.", 0) == 0) parameter.value.fill_(NAN);
  });
  EXPECT_EQ(loss(), before);
}

}  // namespace
}  // namespace megatron
