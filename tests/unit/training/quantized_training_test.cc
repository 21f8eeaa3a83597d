// A small model trained in FP8 or FP4 compared with bf16, with exact rounding on the CPU.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "megatron/tensor/torch.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

using Change = std::function<void(Arguments&)>;

Arguments small(const std::string& name) {
  Arguments a;
  TransformerConfig& t = a.transformer;
  t.num_layers = 1;
  t.hidden_size = 128;
  t.ffn_hidden_size = 128;
  t.num_attention_heads = 4;
  t.seq_length = 64;
  t.swiglu = true;
  t.add_bias_linear = false;
  t.normalization = Normalization::kRMSNorm;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.hidden_dropout = t.attention_dropout = 0.0;
  t.untie_embeddings_and_output_weights = true;
  a.tokenizer.tokenizer_type = "ByteLevelTokenizer";
  a.data.mock_data = true;
  a.data.num_workers = 0;
  a.optimizer.bf16 = true;
  a.optimizer.lr = 3e-3;
  a.optimizer.lr_warmup_iters = 10;
  a.training.micro_batch_size = 2;
  a.training.global_batch_size = 2;
  a.training.train_iters = 100;
  a.training.eval_iters = 0;
  a.training.log_interval = 1;
  a.training.device = DeviceChoice::kCpu;
  a.training.num_threads = 1;
  a.training.exit_signal_handler = false;
  a.training.run_dir = (std::filesystem::path(testing::TempDir()) / name).string();
  return a;
}

std::vector<double> losses(Arguments arguments) {
  std::filesystem::remove_all(arguments.training.run_dir);
  arguments.finalize();
  testing::internal::CaptureStdout();
  pretrain(gpt_task(), arguments);
  testing::internal::GetCapturedStdout();
  std::vector<double> out;
  std::ifstream file(std::filesystem::path(arguments.training.run_dir) / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (const auto record = nlohmann::json::parse(line); record["type"] == "train")
      out.push_back(record["lm loss"]);
  return out;
}

double mean_of_last(const std::vector<double>& values, size_t count) {
  double sum = 0;
  for (size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
  return sum / static_cast<double>(count);
}

struct Recipe {
  const char* name;
  Fp8Format format;
  Fp8Recipe recipe;
};

const std::vector<double>& bf16_losses() {
  static const std::vector<double> all = losses(small("quantized_bf16"));
  return all;
}

const auto kRecipes =
    testing::Values(Recipe{"tensorwise", Fp8Format::kHybrid, Fp8Recipe::kTensorwise},
                    Recipe{"delayed", Fp8Format::kHybrid, Fp8Recipe::kDelayed},
                    Recipe{"blockwise", Fp8Format::kE4M3, Fp8Recipe::kBlockwise});
std::string recipe_name(const testing::TestParamInfo<Recipe>& info) { return info.param.name; }

// The last losses in FP8 are those in bf16 within a part of them, which are below a part of the
// first one.
struct Follows {
  size_t last;
  double learned, within;
};
void expect_follows(Arguments a, const Recipe& recipe, const std::vector<double>& bf16,
                    const Follows& follows) {
  a.transformer.fp8_format = recipe.format;
  a.transformer.fp8_recipe = recipe.recipe;
  const std::vector<double> fp8 = losses(a);
  ASSERT_EQ(fp8.size(), bf16.size());
  EXPECT_NE(fp8.front(), bf16.front()) << "nothing was rounded";
  EXPECT_LT(mean_of_last(bf16, follows.last), follows.learned * bf16.front())
      << "the model learns something";
  EXPECT_NEAR(mean_of_last(fp8, follows.last) / mean_of_last(bf16, follows.last), 1.0,
              follows.within);
}

// Few steps at a large rate.
Arguments briefly(Arguments a) {
  a.training.train_iters = 12;
  a.optimizer.lr = 1e-2;
  a.optimizer.lr_warmup_iters = 2;
  a.optimizer.lr_decay_iters = 100;
  return a;
}

class QuantizedTraining : public testing::TestWithParam<Recipe> {};

TEST_P(QuantizedTraining, LossFollowsBf16) {
  expect_follows(small(std::string("quantized_") + GetParam().name), GetParam(), bf16_losses(),
                 {20, 0.8, 0.01});
}
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedTraining, kRecipes, recipe_name);

// Experts, one of them shared, behind latent attention: every product that is quantised.
Arguments with_experts(const std::string& name) {
  Arguments a = briefly(small(name));
  TransformerConfig& t = a.transformer;
  t.num_experts = 4;
  t.moe_router_topk = 2;
  t.moe_ffn_hidden_size = 128;
  t.moe_shared_expert_intermediate_size = 128;
  t.moe_latent_size = 128;
  t.multi_latent_attention = true;
  t.q_lora_rank = 128;
  t.kv_lora_rank = 128;
  t.qk_head_dim = 64;
  t.qk_pos_emb_head_dim = 128;
  t.v_head_dim = 64;
  t.kv_channels = t.query_head_size();
  t.qk_layernorm = true;
  return a;
}

class QuantizedExperts : public testing::TestWithParam<Recipe> {};

TEST_P(QuantizedExperts, LossFollowsBf16) {
  static const std::vector<double> bf16 = losses(with_experts("experts_bf16"));
  expect_follows(with_experts(std::string("experts_") + GetParam().name), GetParam(), bf16,
                 {4, 0.95, 0.04});  // roundings change choices
}
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedExperts, kRecipes, recipe_name);

// Mamba-2 and a gated delta net, whose in_proj and out_proj are the only products of the layers.
Arguments with_states(const std::string& name) {
  Arguments a = briefly(small(name));
  TransformerConfig& t = a.transformer;
  t.hybrid_layer_pattern = "MG";
  t.num_layers = 2;
  t.position_embedding_type = PositionEmbedding::kNone;
  t.mamba_num_heads = 64;
  t.mamba_head_dim = 4;
  t.mamba_state_dim = 16;
  t.mamba_num_groups = 2;
  t.mamba_chunk_size = 16;
  t.linear_num_key_heads = 2;
  t.linear_key_head_dim = 32;
  t.linear_num_value_heads = 64;
  t.linear_value_head_dim = 2;
  return a;
}

class QuantizedStates : public testing::TestWithParam<Recipe> {};

TEST_P(QuantizedStates, LossFollowsBf16) {
  static const std::vector<double> bf16 = losses(with_states("states_bf16"));
  expect_follows(with_states(std::string("states_") + GetParam().name), GetParam(), bf16,
                 {4, 0.95, 0.02});
}
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedStates, kRecipes, recipe_name);

TEST(QuantizedRuns, Fp4LearnsToo) {
  Arguments a = small("quantized_fp4");
  a.training.train_iters = 40;
  a.optimizer.lr_decay_iters = 100;
  const std::vector<double> bf16 = losses(a);
  a.transformer.fp4_format = Fp4Format::kE2M1;
  const std::vector<double> fp4 = losses(a);
  EXPECT_NE(fp4.front(), bf16.front());
  EXPECT_NEAR(mean_of_last(fp4, 5) / mean_of_last(bf16, 5), 1.0, 0.03);
}

// Losses of ten steps, saved after six and gone on from there.
void expect_same_after_resume(const std::string& name, const Change& change,
                              Arguments (*model)(const std::string&) = small) {
  Arguments whole = model(name);
  whole.training.train_iters = 10;
  whole.training.global_batch_size = 4;
  whole.optimizer.lr_decay_iters = 100;
  change(whole);
  const std::vector<double> expected = losses(whole);
  Arguments first = whole;
  first.training.save = whole.training.run_dir + "_save";
  first.training.run_dir += "_first";
  std::filesystem::remove_all(first.training.save);
  first.training.exit_interval = 6;
  losses(first);
  Arguments second = whole;
  second.training.load = first.training.save;
  second.training.run_dir += "_second";
  const std::vector<double> resumed = losses(second);
  ASSERT_EQ(resumed.size(), 4u);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(resumed[i], expected[6 + i]) << name << ", step " << 7 + i;
}

TEST(QuantizedRuns, DelayedScalesComeBackWithTheCheckpoint) {
  expect_same_after_resume("quantized_resume", [](Arguments& a) {
    a.transformer.fp8_format = Fp8Format::kHybrid;
    a.transformer.fp8_amax_history_len = 4;
    a.transformer.fp8_amax_compute_algo = AmaxAlgorithm::kMax;
  });
}

TEST(QuantizedRuns, DelayedScalesOfExpertsComeBackWithTheCheckpoint) {
  expect_same_after_resume(
      "experts_resume",
      [](Arguments& a) {
        a.transformer.fp8_format = Fp8Format::kHybrid;
        a.transformer.fp8_amax_history_len = 4;
        a.transformer.fp8_amax_compute_algo = AmaxAlgorithm::kMax;
      },
      with_experts);
}

TEST(QuantizedRuns, DelayedScalesOfStatesComeBackWithTheCheckpoint) {
  expect_same_after_resume(
      "states_resume",
      [](Arguments& a) {
        a.transformer.fp8_format = Fp8Format::kHybrid;
        a.transformer.fp8_amax_history_len = 4;
        a.transformer.fp8_amax_compute_algo = AmaxAlgorithm::kMax;
      },
      with_states);
}

TEST(QuantizedRuns, RecomputationOfExpertsChangesNoBit) {
  std::vector<std::vector<double>> all;
  for (const char* modules : {"", "moe", "moe_act"}) {
    Arguments a = with_experts("experts_recompute");
    a.training.train_iters = 3;
    a.transformer.fp8_format = Fp8Format::kHybrid;
    if (*modules != 0) {
      a.transformer.recompute_granularity = RecomputeGranularity::kSelective;
      a.transformer.recompute_modules = {modules};
    }
    all.push_back(losses(a));
  }
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], all[0]);
}

// Scales of a step are fixed before it, so recomputation sees the same ones.
TEST(QuantizedRuns, RecomputationChangesNoBit) {
  for (const Fp8Recipe recipe : {Fp8Recipe::kTensorwise, Fp8Recipe::kDelayed}) {
    std::vector<std::vector<double>> all;
    for (int variant = 0; variant < 3; ++variant) {
      Arguments a = small("quantized_recompute");
      a.training.train_iters = 4;
      a.optimizer.lr_decay_iters = 100;
      a.transformer.fp8_format = Fp8Format::kHybrid;
      a.transformer.fp8_recipe = recipe;
      if (variant == 1) a.transformer.recompute_granularity = RecomputeGranularity::kFull;
      if (variant == 2) {
        a.transformer.recompute_granularity = RecomputeGranularity::kSelective;
        a.transformer.recompute_modules = {"layernorm", "mlp_act"};
      }
      all.push_back(losses(a));
    }
    EXPECT_EQ(all[1], all[0]);
    EXPECT_EQ(all[2], all[0]);
  }
}

// The largest values of a step are those of all its micro-batches, on whatever rank and stage they
// were.
TEST(QuantizedRuns, DataRanksAndStagesShareDelayedScales) {
  Arguments one = small("quantized_layouts");
  one.transformer.num_layers = 2;
  one.transformer.fp8_format = Fp8Format::kHybrid;
  one.training.micro_batch_size = 1;
  one.training.global_batch_size = 4;
  one.optimizer.lr_warmup_iters = 0;
  one.optimizer.lr_decay_iters = 100;
  one.finalize();
  constexpr int kSteps = 3;
  const TrainingTrace reference = trace_training(gpt_task(), one, {at::kFloat, kSteps});
  Arguments data = one, stages = one;
  data.world_size = 2;
  stages.world_size = stages.parallel.pipeline_model_parallel_size = 2;
  for (const Arguments* layout : {&data, &stages}) {
    const TrainingTrace trace = trace_training(gpt_task(), *layout, {at::kFloat, kSteps});
    // Sums of gradients in another order move a few elements to a neighbouring code; other scales
    // would move nearly all.
    for (const Comparison& c : compare_traces(trace, reference, 5e-3))
      EXPECT_TRUE(c.holds()) << c.name << ": " << c.difference << " of " << c.allowed;
    EXPECT_TRUE(trace.faults.empty());
  }
}

}  // namespace
}  // namespace megatron
