// A model with retrieval against Megatron-Core's RetroModel: losses of tokens and every gradient;
// and that no row sees what was retrieved for chunks that end after it.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/model_table.h"
#include "megatron/models/retro/retro_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

// Their names of norms that are parts of our linears, and of parts of cross attention.
std::string our_name(std::string name) {
  name = replaced(name, ".pre_mlp_layernorm.norm.", ".pre_mlp_layernorm.");
  name = replaced(name, ".cross_attention.attn.", ".cross_attention.");
  name = replaced(name, ".input_layernorm.", ".self_attention.linear_qkv.layer_norm_");
  return replaced(name, ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_");
}

struct RetroGolden {
  nlohmann::json spec;
  std::map<std::string, std::map<std::string, at::Tensor>> tensors;  // by weight, grad, in, out

  explicit RetroGolden(const std::string& name) {
    const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/retro/" + name + ".safetensors");
    spec = nlohmann::json::parse(file.header().metadata.at("case"));
    for (const auto& [full, tensor] : read_golden_tensors(file)) {
      const size_t slash = full.find('/');
      tensors[full.substr(0, slash)][our_name(full.substr(slash + 1))] = tensor;
    }
  }
  ModelConfig config(bool recomputed = false) const {
    ModelConfig config;
    config.type = "retro";
    TransformerConfig& t = config.transformer;
    t.num_layers = spec["layers"];
    t.hidden_size = spec["hidden"];
    t.num_attention_heads = spec["heads"];
    t.ffn_hidden_size = spec["ffn"];
    t.seq_length = spec["seq"];
    t.max_position_embeddings = spec["positions"];
    t.untie_embeddings_and_output_weights = !spec["tied"].get<bool>();
    t.hidden_dropout = t.attention_dropout = 0;
    if (recomputed) {
      t.recompute_granularity = RecomputeGranularity::kFull;
      t.recompute_method = RecomputeMethod::kUniform;
      t.recompute_num_layers = 1;
    }
    t.finalize();
    config.vocab_size = spec["vocab"];
    config.padded_vocab_size = config.vocab_size + 3;
    RetroConfig own;
    own.retro_chunk_length = spec["chunk"];
    own.retro_num_neighbors = spec["neighbors"];
    own.retro_encoder_num_layers = spec["encoder_layers"];
    own.retro_encoder_hidden_dropout = own.retro_encoder_attention_dropout = 0;
    config.own = OwnConfig(own);
    return config;
  }
  Batch batch() const {
    Batch batch;
    const auto& in = tensors.at("in");
    batch.set("tokens", in.at("tokens").to(at::kLong));
    batch.set("labels", in.at("labels").to(at::kLong));
    batch.set("loss_mask", in.at("loss_mask").to(at::kFloat));
    batch.set("neighbor_tokens", in.at("neighbors").to(at::kLong));
    const auto shape = batch["neighbor_tokens"].sizes();
    batch.set("neighbor_mask", at::ones({shape[0], shape[1], shape[2]}, at::kByte));
    return batch;
  }
};

// A whole model with the golden's weights.
struct BuiltModel {
  ParallelGroups groups;
  RetroModel model;
  PlainParameterStore store;

  BuiltModel(const RetroGolden& golden, const ModelConfig& config, at::ScalarType dtype)
      : model(config, groups, {0, config.transformer.num_layers, true, true}, {}),
        store(model, dtype, at::kCPU, /*gradients=*/true) {
    size_t found = 0;
    model.visit([&](const std::string& name, Parameter& parameter) {
      const at::Tensor& value = golden.tensors.at("weight").at(name);
      parameter.value.zero_();
      parameter.value.narrow(0, 0, value.size(0)).copy_(value);
      ++found;
    });
    EXPECT_EQ(found, golden.tensors.at("weight").size());
  }
  at::Tensor logits(const Batch& batch) {
    const at::NoGradGuard no_grad;
    const ForwardContext context = context_for(batch["tokens"], /*training=*/false);
    return model.logits(model.hidden(batch, {}, context).front());
  }
};

void expect_equal_to_golden(const RetroGolden& golden, bool recomputed, at::ScalarType dtype) {
  BuiltModel built(golden, golden.config(recomputed), dtype);
  Batch batch = golden.batch();
  ForwardContext context = context_for(batch["tokens"], /*training=*/true);
  batch.place = context.place;
  RecomputeTape tape;
  context.tape = &tape;
  const StageTensors hidden = built.model.hidden(batch, {}, context);
  const Loss loss = built.model.loss(hidden, batch, context);
  const auto& out = golden.tensors.at("out");
  expect_close((loss.sum / loss.weight).reshape({}), out.at("loss"), 1e-5, 0, "loss");
  {
    const at::NoGradGuard no_grad;
    expect_close(built.model.token_losses(hidden.front(), batch["labels"]).t(),
                 out.at("token_loss"), 1e-5, 0, "losses of tokens");
  }
  if (!golden.tensors.contains("grad")) return;
  tape.backward(BackwardRoot(loss.sum), {(1 / loss.weight).to(loss.sum)});
  double all = 0;
  for (const auto& [name, grad] : golden.tensors.at("grad"))
    all += std::pow(grad.norm().item<double>(), 2);
  built.model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = golden.tensors.at("grad").at(name);
    expect_close(built.store.grad(parameter).narrow(0, 0, expected.size(0)), expected, 1e-5,
                 std::sqrt(all), "gradient of " + name);
  });
}

class RetroGoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(RetroGoldenTest, LossesAndGradients) {
  const RetroGolden golden(GetParam());
  for (const bool recomputed : {false, true})
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      SCOPED_TRACE(recomputed ? "recomputed" : "saved");
      expect_equal_to_golden(golden, recomputed, dtype);
    }
}
INSTANTIATE_TEST_SUITE_P(All, RetroGoldenTest, testing::Values("retro_two", "retro_part"),
                         [](const auto& test) { return test.param; });

// The first row whose logits differ at all, and whether that one differs visibly.
std::pair<int64_t, bool> first_difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor rows = (a - b).abs().amax({1, 2});  // [s]
  for (int64_t i = 0; i < rows.size(0); ++i)
    if (rows[i].item<double>() > 0) return {i, rows[i].item<double>() > 1e-9};
  return {rows.size(0), true};
}

// Changing the neighbours of chunk u, or one of its tokens, changes no logits before the chunk's
// last row (before the token's own), and does change those.
TEST_P(RetroGoldenTest, NoRowSeesWhatComesAfterIt) {
  const RetroGolden golden(GetParam());
  BuiltModel built(golden, golden.config(), at::kDouble);
  const Batch batch = golden.batch();
  const at::Tensor logits = built.logits(batch);
  const int64_t m = golden.spec["chunk"], s = golden.spec["seq"], vocab = golden.spec["vocab"];
  const ChunkedRows chunks(s, m);
  for (int64_t u = 0; u < chunks.l; ++u) {
    SCOPED_TRACE(u);
    Batch other = batch;
    at::Tensor neighbors = batch["neighbor_tokens"].clone();
    neighbors.select(1, u).add_(1).remainder_(vocab);
    other.set("neighbor_tokens", neighbors);
    const int64_t last = chunks.first() + u * m - 1;
    EXPECT_EQ(first_difference(built.logits(other), logits), std::pair(last, true));
  }
  for (int64_t i = 0; i < s; ++i) {
    SCOPED_TRACE(i);
    Batch other = batch;
    at::Tensor tokens = batch["tokens"].clone();
    tokens.select(1, i).add_(1).remainder_(vocab);
    other.set("tokens", tokens);
    EXPECT_EQ(first_difference(built.logits(other), logits), std::pair(i, true));
  }
}

// What stands in the place of a neighbour that is not there has no influence, and rows that read no
// neighbour at all are those of a model without cross attention.
TEST_P(RetroGoldenTest, MissingNeighborsAreNotRead) {
  const RetroGolden golden(GetParam());
  BuiltModel built(golden, golden.config(), at::kDouble);
  const Batch batch = golden.batch();
  const at::Tensor logits = built.logits(batch);
  const int64_t vocab = golden.spec["vocab"], s = golden.spec["seq"], m = golden.spec["chunk"];
  const ChunkedRows chunks(s, m);
  for (int64_t u = 0; u < chunks.l; ++u) {
    SCOPED_TRACE(u);
    Batch masked = batch;
    at::Tensor mask = batch["neighbor_mask"].clone();
    mask.select(1, u).select(1, 1).zero_();
    masked.set("neighbor_mask", mask);
    const at::Tensor expected = built.logits(masked);
    EXPECT_EQ(first_difference(expected, logits), std::pair(chunks.first() + u * m - 1, true));
    at::Tensor neighbors = batch["neighbor_tokens"].clone();
    neighbors.select(1, u).select(1, 1).add_(1).remainder_(vocab);
    masked.set("neighbor_tokens", neighbors);
    EXPECT_TRUE(at::equal(built.logits(masked), expected));
  }
  Batch none = batch;
  none.set("neighbor_mask", at::zeros_like(batch["neighbor_mask"]));
  const at::Tensor without = built.logits(none);
  built.model.visit([](const std::string& name, Parameter& parameter) {
    if (name.find("cross_attention.linear_proj") != std::string::npos &&
        name.find("encoder") == std::string::npos)
      parameter.value.zero_();
  });
  EXPECT_TRUE(at::allclose(built.logits(batch), without, 1e-12, 1e-12));
}

}  // namespace
}  // namespace megatron
