// Self attention with --attention-output-gate: Qwen 3.5's layer in transformers, and ranks against
// one.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "megatron/comm/thread_backend.h"
#include "megatron/transformer/attention/attention.h"
#include "megatron/transformer/attention/attention_cost.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/transformer/ssm/measured_mixer.h"
#include "tests/unit/transformer/ssm/mixer_pass.h"

namespace megatron {
namespace {

TransformerConfig gated_attention_config() {
  TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = 8;
  config.num_attention_heads = 4;
  config.group_query_attention = true;
  config.num_query_groups = 2;
  config.kv_channels = 6;
  config.seq_length = 16;
  config.normalization = Normalization::kRMSNorm;
  config.layernorm_epsilon = 1e-6;
  config.layernorm_zero_centered_gamma = true;
  config.qk_layernorm = config.attention_output_gate = true;
  config.add_bias_linear = false;
  config.position_embedding_type = PositionEmbedding::kNone;
  config.init_method_std = 0.4;
  config.hidden_dropout = config.attention_dropout = 0.0;
  config.finalize();
  return config;
}

TEST(AttentionGate, EqualsTransformers) {
  const SafetensorsFile file(MEGATRON_SOURCE_DIR
                             "/tests/golden/gated_delta/qwen3_5_attention.safetensors");
  const std::map<std::string, at::Tensor> golden = read_golden_tensors(file);
  MixerRun what{gated_attention_config(), u(30, {16, 2, 8}), u(40, {16, 2, 8}), {}};
  what.config.norm_placement = NormPlacement::kPost;  // no norm of the input
  const MixerPass pass = run_mixer<SelfAttention>(
      what, ParallelGroups(), false, [&](const std::string& name, Parameter& parameter) {
        if (name == "linear_qkv.weight")
          parameter.value.copy_(golden.at("values/linear_qkv.weight"));
        if (name == "linear_proj.weight") parameter.value.copy_(0.5 * u(64, {8, 24}));
        if (name == "q_layernorm.weight") parameter.value.copy_(0.1 * u(65, {6}));
        if (name == "k_layernorm.weight") parameter.value.copy_(0.1 * u(66, {6}));
      });
  EXPECT_LT(largest(pass.y - golden.at("y")), 1e-11);
  EXPECT_LT(largest(pass.dx - golden.at("dx")), 1e-11);
  ASSERT_EQ(pass.grads.size() + 3, golden.size());
  for (const auto& [name, grad] : pass.grads)
    EXPECT_LT(largest(grad - golden.at(name)), 1e-10) << name;
}

// Also with ranks that share a group of keys and values, and with context ranks.
TEST(AttentionGate, RanksComputeWhatOneComputes) {
  MixerRun what{gated_attention_config(), draw({16, 2, 8}, 1), draw({16, 2, 8}, 2), {}};
  for (const bool norms : {true, false}) {
    what.config.qk_layernorm = norms;
    const MixerPass serial = run_mixer<SelfAttention>(what, ParallelGroups(), false);
    for (const auto& [t, c, sequence_parallel] :
         {std::tuple{2, 1, false}, {2, 1, true}, {4, 1, false}, {1, 2, false}, {2, 2, true}})
      run_ranks(t * c, [&, t = t, c = c, sequence_parallel = sequence_parallel](
                           const std::shared_ptr<Backend>& world) {
        ParallelConfig parallel;
        parallel.tensor_model_parallel_size = t;
        parallel.context_parallel_size = c;
        parallel.sequence_parallel = sequence_parallel;
        expect_part<SelfAttention>(what, serial, make_parallel_groups(parallel, world),
                                   sequence_parallel, cat("tensor ", t, ", context ", c));
      });
  }
}

TEST(AttentionGate, SavesWhatThePlanSays) {
  for (const int64_t groups : {1, 2, 4}) {
    for (const bool norms : {true, false}) {
      TransformerConfig config = gated_attention_config();
      config.num_query_groups = groups;
      config.qk_layernorm = norms;
      const LayerShape shape = mixer_shape(32, 1, 1);
      const SublayerCost cost = attention_cost(config, 1, shape, false);
      const MeasuredMixer measured =
          measure_mixer<SelfAttention>(config, ParallelGroups(), shape, 0.0);
      config.attention_output_gate = false;
      const SublayerCost plain = attention_cost(config, 1, shape, false);
      const MeasuredMixer without =
          measure_mixer<SelfAttention>(config, ParallelGroups(), shape, 0.0);
      EXPECT_NEAR(static_cast<double>(measured.saved - without.saved),
                  static_cast<double>(cost.saved.total() - plain.saved.total()), 64)
          << groups << " groups, norms " << norms;
      EXPECT_EQ(cost.linears[0].outputs - plain.linears[0].outputs, 24);
      EXPECT_EQ(cost.linears[0].unreported, 24) << "as Megatron counts";
    }
  }
}

}  // namespace
}  // namespace megatron
