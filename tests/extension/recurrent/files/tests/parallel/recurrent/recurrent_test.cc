// Layers with a recurrent state, mixed with attention: the scan and its gradients, every layout
// against one rank, and decoding.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/inference/generator.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/recurrent/gated_scan.h"
#include "tests/extension/proofs.h"

namespace megatron {
namespace {

constexpr const char* kRun =
    "--layer-pattern R-,*-,R-,*- --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-layers 4 ";
constexpr const char* kSmall =
    "--hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 24 "
    "--init-method-std 0.2 --adam-eps 1e-3 --hidden-dropout 0.1 ";
constexpr const char* kMeasured =
    "--hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout 0 ";

// Against s_t = a_t s_{t-1} + (1 - a_t) v_t, written out and differentiated by autograd.
TEST(GatedScan, GradientsAreThoseOfTheRecurrence) {
  at::manual_seed(1);
  const auto leaf = [] { return at::rand({5, 2, 3}, at::kDouble).set_requires_grad(true); };
  const at::Tensor a = leaf(), v = leaf(), dy = at::randn({5, 2, 3}, at::kDouble);
  torch::autograd::backward({gated_scan(a, v)}, {dy});
  const at::Tensor da = a.grad().clone(), dv = v.grad().clone();
  a.mutable_grad().reset();
  v.mutable_grad().reset();
  at::Tensor state = at::zeros({2, 3}, at::kDouble);
  std::vector<at::Tensor> all;
  for (int64_t t = 0; t < 5; ++t) all.push_back(state = a[t] * state + (1 - a[t]) * v[t]);
  torch::autograd::backward({at::stack(all)}, {dy});
  EXPECT_TRUE(at::allclose(da, a.grad(), 1e-12, 1e-13));
  EXPECT_TRUE(at::allclose(dv, v.grad(), 1e-12, 1e-13));
  const at::NoGradGuard no_grad;
  const at::Tensor halves = at::cat({gated_scan(a.narrow(0, 0, 2), v.narrow(0, 0, 2)),
                                     gated_scan(a.narrow(0, 2, 3), v.narrow(0, 2, 3), all[1])});
  EXPECT_TRUE(at::allclose(halves, at::stack(all), 1e-12, 1e-13));
}

// Rows of different length, one padded on the left: each token is the likeliest one after a full
// forward over everything before it.
TEST(Recurrent, Decodes64TokensLikeTheFullForward) {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = 4;
  t.layer_pattern = "R-,*-,R-,*-";
  t.hidden_size = 32;
  t.num_attention_heads = 4;
  t.seq_length = t.max_position_embeddings = 96;
  t.init_method_std = 0.4;
  t.finalize();
  config.vocab_size = 257;
  config.padded_vocab_size = 320;
  const ParallelGroups groups;
  const std::unique_ptr<Model> model = make_model(config, groups);
  const PlainParameterStore store(*model, at::kDouble, at::kCPU, false);
  initialize_parameters(*model, 5, groups);
  TokenizerConfig bytes;
  bytes.tokenizer_type = "ByteLevelTokenizer";
  GenerateOptions options;
  options.sampling.greedy = true;
  options.stop_at_eod = false;
  const std::vector<std::string> prompts = {"a longer prompt", "short"};
  const auto results = generate(*model, *make_tokenizer(bytes), prompts, options);
  ASSERT_EQ(results.size(), 2u);
  for (const Generation& result : results) {
    ASSERT_EQ(result.tokens.size(), 64u);
    std::vector<int32_t> ids = result.prompt_tokens;
    ids.insert(ids.end(), result.tokens.begin(), result.tokens.end());
    const at::Tensor expected = full_logits(*model, ids).argmax(-1);
    for (size_t i = result.prompt_tokens.size(); i < ids.size(); ++i)
      EXPECT_EQ(ids[i], expected[static_cast<int64_t>(i) - 1].item<int64_t>()) << i;
  }
}

std::vector<ProvedLayout> layouts() {
  std::vector<ProvedLayout> all = proved_layouts();
  std::erase_if(all, [](const ProvedLayout& layout) { return layout.name == std::string("cp2"); });
  return all;
}

class RecurrentLayouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(RecurrentLayouts, TrainWhatOneRankTrains) {
  EXPECT_EQ(differences_in_fp64(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(RecurrentLayouts, AreProved) {
  EXPECT_EQ(unproved(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(RecurrentLayouts, NeedTheMemoryOfThePlan) {
  for (const RankMemory& rank :
       memory_of_ranks(cat(kRun, kMeasured, GetParam().flags), GetParam().ranks))
    EXPECT_NEAR(double(rank.planned) / double(rank.metered), 1.0, 0.01)
        << rank.planned << " and " << rank.metered;
}

INSTANTIATE_TEST_SUITE_P(Proofs, RecurrentLayouts, testing::ValuesIn(layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Recurrent, ContextParallelismIsRefusedByName) {
  try {
    differences_in_fp64(cat(kRun, kSmall, "--context-parallel-size 2"), 2);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("recurrent layers need whole sequences"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace megatron
