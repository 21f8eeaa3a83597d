// The configuration: derived values, errors, per-layer tables; rotary angles.
#include "megatron/transformer/config/transformer_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TransformerConfig valid_config() {
  TransformerConfig config;
  config.num_layers = 4;
  config.hidden_size = 64;
  config.num_attention_heads = 4;
  config.seq_length = 32;
  return config;
}

std::vector<std::string> violations_of(TransformerConfig config) {
  config.finalize();
  Violations violations;
  config.validate(violations);
  return violations.messages();
}

TEST(TransformerConfig, TheFirstLayersOfAChunkAreOffloaded) {
  TransformerConfig config = valid_config();
  EXPECT_EQ(config.num_offloaded_layers(4, false), 0);
  EXPECT_FALSE(config.offloads("core_attn"));
  config.cpu_offloading_num_layers = 2;
  EXPECT_EQ(config.num_offloaded_layers(4, true), 2);
  EXPECT_TRUE(config.offloads("mlp_fc2"));
  config.cpu_offloading_num_layers = 0;
  config.fine_grained_activation_offloading = true;
  config.offload_modules = {"core_attn"};
  EXPECT_TRUE(config.offloads("core_attn"));
  EXPECT_FALSE(config.offloads("mlp_fc2"));
  EXPECT_EQ(config.num_offloaded_layers(4, false), 4);
  EXPECT_EQ(config.num_offloaded_layers(4, true), 3) << "the last layer's backward comes first";
  config.activation_offload_fraction = 0.4;
  EXPECT_EQ(config.num_offloaded_layers(4, true), 2);
}

TEST(TransformerConfig, TheLayersAtTheEdgesStayOutOfFp8) {
  TransformerConfig config = valid_config();
  EXPECT_FALSE(config.quantization(1).enabled());
  config.fp8_format = Fp8Format::kHybrid;
  config.fp8_margin = 2;
  EXPECT_EQ(config.quantization(1).recipe, QuantizationRecipe::kDelayed);
  EXPECT_EQ(config.quantization(1).delayed.margin, 2);
  EXPECT_EQ(config.quantization(1).type(OperandRole::kGradient), at::kFloat8_e5m2);
  EXPECT_EQ(config.quantization(1).type(OperandRole::kWeight), at::kFloat8_e4m3fn);
  config.fp8_margin = 0;
  config.fp8_format = Fp8Format::kE4M3;
  config.fp8_recipe = Fp8Recipe::kBlockwise;
  config.first_last_layers_bf16 = true;
  config.num_layers_at_end_in_bf16 = 2;
  EXPECT_THAT(violations_of(config), IsEmpty());
  for (int64_t layer = 1; layer <= 4; ++layer)
    EXPECT_EQ(config.quantization(layer).enabled(), layer == 2) << layer;
  EXPECT_EQ(config.quantization(2).type(OperandRole::kGradient), at::kFloat8_e4m3fn);
  EXPECT_EQ(config.quantization(2).alignment(), 128);
  config.remove_quantization();
  EXPECT_FALSE(config.is_quantized());
  EXPECT_THAT(violations_of(config), IsEmpty());
}

TEST(TransformerConfig, DerivesWhatWasNotGiven) {
  TransformerConfig config = valid_config();
  config.finalize();
  EXPECT_EQ(config.ffn_hidden_size, 256);
  EXPECT_EQ(config.kv_channels, 16);
  EXPECT_EQ(config.max_position_embeddings, 32);
  EXPECT_EQ(config.query_groups(), 4);
  EXPECT_THAT(config.recompute_modules, IsEmpty());

  TransformerConfig given = valid_config();
  given.swiglu = true;
  given.hidden_size = 4096;
  given.kv_channels = 128;
  given.max_position_embeddings = 99;
  given.group_query_attention = true;
  given.num_query_groups = 2;
  given.use_rotary_position_embeddings = true;
  given.recompute_granularity = RecomputeGranularity::kSelective;
  for (int i = 0; i < 2; ++i) {  // idempotent
    given.finalize();
    EXPECT_EQ(given.ffn_hidden_size, 10880);
    EXPECT_EQ(given.kv_channels, 128);
    EXPECT_EQ(given.max_position_embeddings, 99);
    EXPECT_EQ(given.query_groups(), 2);
    EXPECT_EQ(given.position_embedding_type, PositionEmbedding::kRope);
    EXPECT_THAT(given.recompute_modules, ElementsAre("core_attn"));
  }
  TransformerConfig kept = valid_config();
  kept.ffn_hidden_size = 100;
  kept.recompute_granularity = RecomputeGranularity::kSelective;
  kept.recompute_modules = {"layernorm"};
  kept.finalize();
  EXPECT_EQ(kept.ffn_hidden_size, 100);
  EXPECT_TRUE(kept.recomputes("layernorm"));
  EXPECT_FALSE(kept.recomputes("core_attn"));
  kept.recompute_granularity = RecomputeGranularity::kFull;
  EXPECT_FALSE(kept.recomputes("layernorm"));
}

TEST(TransformerConfig, ContextParallelTypeIsOneOrOnePerLayer) {
  TransformerConfig config = valid_config();
  EXPECT_EQ(config.context_parallel_type(4), ContextParallelType::kP2P);
  config.cp_comm_type = {"a2a+p2p"};
  EXPECT_EQ(config.context_parallel_type(4), ContextParallelType::kA2AP2P);
  config.cp_comm_type = {"p2p", "all_gather", "a2a", "p2p"};
  EXPECT_EQ(config.context_parallel_type(2), ContextParallelType::kAllGather);
  EXPECT_EQ(config.context_parallel_type(3), ContextParallelType::kA2A);
}

TEST(TransformerConfig, NamesWhatIsMissing) {
  EXPECT_THAT(violations_of({}),
              ElementsAre("--num-layers is required and must be positive",
                          "--hidden-size is required and must be positive",
                          "--num-attention-heads is required and must be positive",
                          "--seq-length is required and must be positive"));
}

TransformerConfig& rope(TransformerConfig& config) {
  config.position_embedding_type = PositionEmbedding::kRope;
  return config;
}

TEST(TransformerConfig, AdapterTargetsAreWrittenOut) {
  TransformerConfig config = valid_config();
  config.lora_rank = 4;
  config.finalize();
  EXPECT_EQ(config.lora_alpha, 4.0);
  EXPECT_THAT(config.lora_targets, ElementsAre("linear_q", "linear_k", "linear_v", "linear_proj",
                                               "linear_fc1", "linear_fc2"));
  config = valid_config();
  config.swiglu = true;
  config.lora_rank = 4;
  config.lora_alpha = 8.0;
  config.lora_targets = {"down_proj", "v_proj", "linear_v", "gate_proj"};
  config.finalize();
  config.finalize();
  EXPECT_THAT(config.lora_targets, ElementsAre("linear_v", "linear_fc1_gate", "linear_fc2"));
  EXPECT_EQ(lora_options(config, "linear_qkv").scale, 2.0);
  EXPECT_EQ(lora_options(config, "linear_proj").rank, 0);
  const LoraOptions gate = lora_options(config, "linear_fc1");
  EXPECT_EQ(gate.adapters, 1);
  EXPECT_EQ(gate.adapter_of_row.front(), 0);
  EXPECT_EQ(gate.adapter_of_row.back(), -1);
}

// Latent attention has other linears; routed experts have no adapters.
TEST(TransformerConfig, AdapterTargetsAreThoseOfTheModel) {
  TransformerConfig config = valid_config();
  config.multi_latent_attention = true;
  config.lora_rank = 4;
  config.num_experts = 4;
  const auto targets = [&](std::vector<std::string> given) {
    TransformerConfig c = config;
    c.lora_targets = std::move(given);
    c.finalize();
    return c.lora_targets;
  };
  EXPECT_THAT(targets({}), ElementsAre("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj",
                                       "linear_proj"));
  EXPECT_THAT(targets({"q_proj", "kv_b_proj"}), ElementsAre("linear_q_proj", "linear_kv_up_proj"));
  config.q_lora_rank = 8;
  config.moe_shared_expert_intermediate_size = 8;
  EXPECT_THAT(targets({"all-linear"}),
              ElementsAre("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
                          "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"));
  const auto absent = [&](std::vector<std::string> given) {
    const AdaptableLinears linears = adaptable_linears(config);
    Violations v;
    validate_lora_targets(written_out_lora_targets(given, linears), linears, v);
    return v.messages().at(0);
  };
  EXPECT_THAT(absent({"linear_q_proj"}),
              HasSubstr("--lora-targets linear_q_proj: this model has no linear of queries alone"));
  EXPECT_THAT(absent({"v_proj"}),
              HasSubstr("--lora-targets v_proj: attention is latent in this model"));
  config.multi_latent_attention = false;
  config.moe_shared_expert_intermediate_size.reset();
  EXPECT_THAT(absent({"q_a_proj"}),
              HasSubstr("--lora-targets q_a_proj: this model has no latents of queries"));
  EXPECT_THAT(absent({"kv_b_proj"}),
              HasSubstr("--lora-targets kv_b_proj: this model has no latent attention"));
  EXPECT_THAT(absent({"up_proj"}),
              HasSubstr("--lora-targets up_proj: every layer of this model has routed experts, for "
                        "which adapters are not built"));
}

TEST(TransformerConfig, AdaptersOfLayersWithStates) {
  const auto targets = [](const char* pattern, std::vector<std::string> given) {
    TransformerConfig c = valid_config();
    c.hybrid_layer_pattern = pattern;
    c.num_layers = 0;
    c.lora_rank = 1;
    c.lora_targets = std::move(given);
    c.finalize();
    return c.lora_targets;
  };
  EXPECT_THAT(targets("MM", {}), ElementsAre("in_proj", "out_proj"));
  EXPECT_THAT(targets("G-", {}), ElementsAre("linear_fc1", "linear_fc2", "in_proj", "out_proj"));
  EXPECT_THAT(targets("*M", {"o_proj", "in_proj"}), ElementsAre("linear_proj", "in_proj"));
  const auto absent = [](const char* pattern, const char* name) {
    TransformerConfig c = valid_config();
    c.hybrid_layer_pattern = pattern;
    c.num_layers = 2;
    Violations v;
    validate_lora_targets({name}, adaptable_linears(c), v);
    return v.messages().at(0);
  };
  EXPECT_THAT(absent("MM", "q_proj"), HasSubstr("q_proj: this model has no attention"));
  EXPECT_THAT(absent("MM", "o_proj"), HasSubstr("o_proj: this model has no attention"));
  EXPECT_THAT(absent("M*", "up_proj"),
              HasSubstr("up_proj: this model has neither MLPs nor shared experts"));
  EXPECT_THAT(absent("*-", "in_proj"),
              HasSubstr("in_proj: this model has neither Mamba-2 layers nor gated delta nets"));
}

// Rows of linear_qkv are, per group, [its query heads | key | value].
TEST(TransformerConfig, AdaptersOfFusedRows) {
  TransformerConfig config = valid_config();
  config.group_query_attention = true;
  config.num_query_groups = 2;
  config.kv_channels = 1;
  config.lora_rank = 1;
  config.lora_targets = {"linear_q", "linear_v"};
  config.finalize();
  EXPECT_THAT(lora_options(config, "linear_qkv").adapter_of_row,
              ElementsAre(0, 0, -1, 1, 0, 0, -1, 1));
  config.lora_targets = {"linear_qkv"};
  EXPECT_THAT(lora_options(config, "linear_qkv").adapter_of_row, IsEmpty());
}

// One broken rule: its name, what breaks it in valid_config(), and the report.
struct BrokenRule {
  const char* name;
  std::string message;
  std::function<void(TransformerConfig&)> change;
};

const std::vector<BrokenRule> kBrokenRules = {
    {"HeadsDivideTheHiddenSize",
     "--hidden-size 66 is not divisible by --num-attention-heads 4\n"
     "hint: give --kv-channels, or a number of heads that divides: 1, 2, 3, 6, 11, 22, 33, 66",
     [](auto& c) { c.hidden_size = 66; }},
    {"RotaryHeadsAreEven", "--kv-channels 15 is odd, rotary embeddings need an even width",
     [](auto& c) { c.kv_channels = 15, c.position_embedding_type = PositionEmbedding::kRope; }},
    {"MlpHasAWidth", "--ffn-hidden-size -1 must be positive",
     [](auto& c) { c.ffn_hidden_size = -1; }},
    {"GroupsDivideTheHeads",
     "--num-attention-heads 4 is not divisible by --num-query-groups 3\nhint: groups that divide "
     "it: 1, 2, 4",
     [](auto& c) { c.group_query_attention = true, c.num_query_groups = 3; }},
    {"PositionsCoverTheSequence", "--max-position-embeddings 31 is below --seq-length 32",
     [](auto& c) { c.max_position_embeddings = 31; }},
    {"RotaryPercentInRange", "--rotary-percent 1.5 is outside (0, 1]",
     [](auto& c) { c.rotary_percent = 1.5; }},
    {"RotaryBaseIsPositive", "--rotary-base 0 must be positive",
     [](auto& c) { c.rotary_base = 0; }},
    {"RopeFactorIsPositive", "--rope-scaling-factor 0 must be positive",
     [](auto& c) { c.rope_scaling_factor = 0.0; }},
    {"InterpolationFactorIsPositive", "--rotary-seq-len-interpolation-factor must be positive",
     [](auto& c) { c.rotary_seq_len_interpolation_factor = 0; }},
    {"OneActivation",
     "more than one activation given\n"
     "hint: use one of --swiglu, --geglu, --exact-geglu, --quick-geglu, --quick-gelu, --relu, "
     "--squared-relu, --openai-gelu",
     [](auto& c) { c.geglu = c.squared_relu = true; }},
    {"OffsetNeedsQuickGeglu", "--glu-linear-offset has an effect only with --quick-geglu",
     [](auto& c) { c.glu_linear_offset = 1.0; }},
    {"HiddenDropoutBelowOne", "--hidden-dropout 1 is outside [0, 1)",
     [](auto& c) { c.hidden_dropout = 1.0; }},
    {"AttentionDropoutFromZero", "--attention-dropout -0.1 is outside [0, 1)",
     [](auto& c) { c.attention_dropout = -0.1; }},
    {"AttentionDropoutIsANumber", "--attention-dropout nan is outside [0, 1)",
     [](auto& c) { c.attention_dropout = std::nan(""); }},
    {"NormEpsilonIsPositive", "--norm-epsilon 0 must be positive",
     [](auto& c) { c.layernorm_epsilon = 0.0; }},
    {"NormBiasesAreThoseOfLayerNorms",
     "--disable-norm-bias has an effect only with --normalization LayerNorm",
     [](auto& c) { c.norm_bias = false, c.normalization = Normalization::kRMSNorm; }},
    {"FirstInputNormIsOneOfInputs",
     "--no-first-input-norm with --parallel-residual or without norms of inputs is not built\n"
     "hint: --norm-placement pre or sandwich",
     [](auto& c) { c.first_input_norm = false, c.norm_placement = NormPlacement::kPost; }},
    {"InitStdIsPositive", "--init-method-std 0 must be positive",
     [](auto& c) { c.init_method_std = 0.0; }},
    {"EmbeddingInitStdIsPositive", "--embedding-init-method-std -1 must be positive",
     [](auto& c) { c.embedding_init_method_std = -1.0; }},
    {"ZLossFromZero", "--z-loss-coeff -1 is negative", [](auto& c) { c.z_loss_coeff = -1.0; }},
    {"MtpLayersFromZero", "--mtp-num-layers -1 is negative\nhint: 0: none",
     [](auto& c) { c.mtp_num_layers = -1; }},
    {"MtpStaysInTheSequence",
     "--mtp-num-layers 40 predict up to 41 tokens ahead in sequences of 32",
     [](auto& c) { c.mtp_num_layers = 40, c.seq_length = 32; }},
    {"MtpRepeatsSeveral",
     "--mtp-use-repeated-layer has an effect only with several --mtp-num-layers",
     [](auto& c) { c.mtp_num_layers = 1, c.mtp_use_repeated_layer = true; }},
    {"MtpFactorNeedsLayers", "--mtp-loss-scaling-factor has an effect only with --mtp-num-layers",
     [](auto& c) { c.mtp_loss_scaling_factor = 0.3; }},
    {"MtpFactorIsPositive",
     "--mtp-loss-scaling-factor 0 must be positive\n"
     "hint: to train without multi-token prediction leave --mtp-num-layers out",
     [](auto& c) { c.mtp_num_layers = 1, c.mtp_loss_scaling_factor = 0; }},
    {"MtpWithoutAdapters",
     "--mtp-num-layers with --lora-rank is not built\nhint: leave one of them out",
     [](auto& c) { c.mtp_num_layers = 1, c.lora_rank = 2; }},
    {"SeedIsPositive", "--seed 0 must be positive", [](auto& c) { c.seed = 0; }},
    {"WindowHasTwoSides", "--window-size takes two values (left, right), got 1",
     [](auto& c) { c.window_size = {4}; }},
    {"CpCommTypeIsKnown",
     "--cp-comm-type ring is not known\nhint: types: p2p, all_gather, a2a, a2a+p2p",
     [](auto& c) { c.cp_comm_type = {"ring"}; }},
    {"CpCommTypeForEachLayer", "--cp-comm-type has 2 values, expected 1 or one per layer, 4",
     [](auto& c) { c.cp_comm_type = {"a2a", "p2p"}; }},
    {"WindowSidesFromMinusOne", "--window-size -2: expected -1 (no limit) or more",
     [](auto& c) { c.window_size = {-2, 0}; }},
    {"SkipFrequencyNeedsAWindow", "--window-attn-skip-freq has an effect only with --window-size",
     [](auto& c) { c.window_attn_skip_freq = "2"; }},
    {"SkipListForEachLayer",
     "--window-attn-skip-freq [1,0]: expected a positive integer, or a list of 4 zeros and ones",
     [](auto& c) { c.window_size = {4, 0}, c.window_attn_skip_freq = "[1,0]"; }},
    {"SkipFrequencyIsPositive",
     "--window-attn-skip-freq 0: expected a positive integer, or a list of 4 zeros and ones",
     [](auto& c) { c.window_size = {4, 0}, c.window_attn_skip_freq = "0"; }},
    {"SkipFrequencyHasNoLeadingZero",
     "--window-attn-skip-freq 00: expected a positive integer, or a list of 4 zeros and ones",
     [](auto& c) { c.window_size = {4, 0}, c.window_attn_skip_freq = "00"; }},
    {"SkipFrequencyFits",
     "--window-attn-skip-freq 99999999999999999999: expected a positive integer, or a list of 4 "
     "zeros and ones",
     [](auto& c) { c.window_size = {4, 0}, c.window_attn_skip_freq = "99999999999999999999"; }},
    {"RecomputedLayersInRange", "--recompute-num-layers 5: expected 1 to 4",
     [](auto& c) { c.recompute_num_layers = 5; }},
    {"RecomputeModulesNeedSelective", "--recompute-modules needs --recompute-granularity selective",
     [](auto& c) { c.recompute_modules = {"layernorm"}; }},
    {"RecomputeModuleWaits",
     "--recompute-modules mhc waits for multi-stream residual connections, which is not built "
     "yet\nhint: parts: core_attn, layernorm, mlp, mlp_act, moe, moe_act, shared_experts, "
     "mla_up_proj, mamba, mamba_norm, gdn_norm_out, retro_encoder",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"mlp", "mhc"};
     }},
    {"RecomputeModuleIsKnown",
     "--recompute-modules attention is not known\nhint: parts: core_attn, layernorm, mlp, "
     "mlp_act, moe, moe_act, shared_experts, mla_up_proj, mamba, mamba_norm, gdn_norm_out, "
     "retro_encoder",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"attention"};
     }},
    {"RecomputeModuleTwice",
     "--recompute-modules mlp_act has no effect together with mlp\n"
     "hint: mlp recomputes the activation too; give one of them",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"mlp", "mlp_act"};
     }},
    {"RecomputedSharedExpertTwice",
     "--recompute-modules shared_experts has no effect together with moe\n"
     "hint: moe recomputes the shared expert too; give one of them",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"moe", "shared_experts"};
     }},
    {"DistributedActivationsNeedFull",
     "--distribute-saved-activations needs --recompute-granularity full",
     [](auto& c) { c.distribute_saved_activations = true; }},
    {"OffloadingNeedsModules",
     "--fine-grained-activation-offloading is given without --offload-modules\n"
     "hint: for example --offload-modules core_attn attn_proj mlp_act mlp_fc2",
     [](auto& c) { c.fine_grained_activation_offloading = true; }},
    {"OffloadModulesNeedOffloading", "--offload-modules needs --fine-grained-activation-offloading",
     [](auto& c) { c.offload_modules = {"core_attn"}; }},
    {"OffloadModuleWaits",
     "--offload-modules gdp_qkv waits for gated-delta attention, which is not built yet\n"
     "hint: modules: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, "
     "mlp_fc2, expert_fc1, moe_act",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"core_attn", "gdp_qkv"};
     }},
    {"OffloadInsideRecomputedMlp",
     "--offload-modules mlp_act has no effect: --recompute-modules mlp saves only its input, "
     "mlp_norm\nhint: leave it out",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"mlp_norm", "mlp_act"};
       c.recompute_granularity = RecomputeGranularity::kSelective, c.recompute_modules = {"mlp"};
     }},
    {"OffloadOfRecomputedNorm",
     "--offload-modules qkv_linear has no effect: --recompute-modules layernorm does not save "
     "it\nhint: leave it out",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"attn_norm", "qkv_linear"};
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"layernorm"};
     }},
    {"OffloadOfRecomputedActivation",
     "--offload-modules mlp_fc2 has no effect: --recompute-modules mlp_act does not save "
     "it\nhint: leave it out",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"mlp_act", "mlp_fc2"};
       c.recompute_granularity = RecomputeGranularity::kSelective,
       c.recompute_modules = {"mlp_act"};
     }},
    {"OffloadInsideRecomputedExperts",
     "--offload-modules moe_act has no effect: --recompute-modules moe saves only its input, "
     "mlp_norm\nhint: leave it out",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"mlp_norm", "moe_act"};
       c.recompute_granularity = RecomputeGranularity::kSelective, c.recompute_modules = {"moe"};
     }},
    {"OffloadOfRecomputedLayer",
     "--offload-modules core_attn has no effect: --recompute-granularity full saves only the "
     "inputs of layers, attn_norm\n"
     "hint: leave it out",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"attn_norm", "core_attn"};
       c.recompute_granularity = RecomputeGranularity::kFull;
     }},
    {"OffloadSizeFromZero", "--min-offloaded-tensor-size -1 is negative",
     [](auto& c) { c.min_offloaded_tensor_size = -1; }},
    {"OffloadFractionInRange", "--activation-offload-fraction 1.5 is outside (0, 1]",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"core_attn"},
       c.activation_offload_fraction = 1.5;
     }},
    {"OffloadFractionNeedsOffloading",
     "--activation-offload-fraction has an effect only with --fine-grained-activation-offloading",
     [](auto& c) { c.activation_offload_fraction = 0.5; }},
    {"OffloadsInFlight", "--fine-grained-offloading-max-inflight-offloads 0 must be positive",
     [](auto& c) { c.fine_grained_offloading_max_inflight_offloads = 0; }},
    {"DistributedOrOffloaded",
     "--distribute-saved-activations is not built together with offloading\nhint: give one of "
     "them",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"attn_norm"};
       c.recompute_granularity = RecomputeGranularity::kFull, c.distribute_saved_activations = true;
     }},
    {"CpuOffloadingLeavesALayer", "--cpu-offloading-num-layers 4: expected 0 to 3",
     [](auto& c) { c.cpu_offloading_num_layers = 4; }},
    {"OneKindOfOffloading",
     "--cpu-offloading-num-layers and --fine-grained-activation-offloading are both given\nhint: "
     "give one of them",
     [](auto& c) {
       c.fine_grained_activation_offloading = true, c.offload_modules = {"attn_norm"},
       c.cpu_offloading_num_layers = 1;
     }},
    {"CpuOffloadingOrRecomputation",
     "--cpu-offloading-num-layers cannot be combined with recomputation\n"
     "hint: give --fine-grained-activation-offloading with --offload-modules",
     [](auto& c) {
       c.cpu_offloading_num_layers = 1, c.recompute_granularity = RecomputeGranularity::kFull;
     }},
    {"OneRecomputeGranularity",
     "--recompute-activations asks for selective recomputation, but --recompute-granularity is "
     "full\n"
     "hint: give one of them",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kFull, c.recompute_activations = true;
     }},
    {"RotaryWidthIsEven",
     "--rotary-percent 0.2 of --kv-channels 16 rotates 3 features, an even number is needed",
     [](auto& c) { rope(c).rotary_percent = 0.2; }},
    {"LocalBaseIsPositive", "--rotary-base-local 0 must be positive",
     [](auto& c) { c.rotary_base_local = 0, c.window_size = {4, 0}; }},
    {"LocalBaseNeedsAWindow", "--rotary-base-local has an effect only with --window-size",
     [](auto& c) { c.rotary_base_local = 9; }},
    {"RopeScalingNeedsRope",
     "--rope-scaling-type has an effect only with --position-embedding-type rope",
     [](auto& c) { c.rope_scaling_type = RopeScaling::kLinear; }},
    {"OneRopeScaling",
     "--use-rope-scaling means --rope-scaling-type llama3, but another type is given",
     [](auto& c) { rope(c).rope_scaling_type = RopeScaling::kYarn, c.use_rope_scaling = true; }},
    {"RopeOriginalLength", "--rope-original-max-position-embeddings 1 must be above 1",
     [](auto& c) { c.rope_original_max_position_embeddings = 1; }},
    {"RopeFactorsAreOrdered", "--rope-high-freq-factor 1 must be above --rope-low-freq-factor 1",
     [](auto& c) {
       rope(c).rope_scaling_type = RopeScaling::kLlama3, c.rope_high_freq_factor = 1.0;
     }},
    {"RopeLowFactorIsPositive", "--rope-low-freq-factor 0 must be positive",
     [](auto& c) { c.rope_low_freq_factor = 0.0; }},
    {"YarnBetasArePositive", "--yarn-beta-fast and --yarn-beta-slow must be positive",
     [](auto& c) { c.yarn_beta_slow = 0.0; }},
    {"RopeAttentionFactorIsPositive", "--rope-attention-factor 0 must be positive",
     [](auto& c) {
       rope(c).rope_scaling_type = RopeScaling::kYarn, c.rope_attention_factor = 0.0;
     }},
    {"RopeAttentionFactorNeedsYarn",
     "--rope-attention-factor has an effect only with --rope-scaling-type yarn or longrope",
     [](auto& c) { c.rope_attention_factor = 1.5; }},
    {"LongRopeListsNeedLongRope",
     "--longrope-short-factor and --longrope-long-factor have an effect only with "
     "--rope-scaling-type longrope",
     [](auto& c) { c.longrope_long_factor = {1.0}; }},
    {"LongRopeListLength",
     "--longrope-long-factor has 2 values, expected one for each of the 8 rotated pairs",
     [](auto& c) {
       rope(c).rope_scaling_type = RopeScaling::kLongRope;
       c.longrope_short_factor.assign(8, 1.0);
       c.longrope_long_factor.assign(2, 1.0);
     }},
    {"LongRopeFactorsArePositive", "--longrope-short-factor has a value that is not positive",
     [](auto& c) {
       rope(c).rope_scaling_type = RopeScaling::kLongRope;
       c.longrope_short_factor.assign(8, 0.0);
       c.longrope_long_factor.assign(8, 1.0);
     }},
    {"QkNormOverHeadsIsRms",
     "--qk-layernorm-over-heads needs --qk-layernorm and --normalization RMSNorm",
     [](auto& c) { c.qk_layernorm_over_heads = c.qk_layernorm = true; }},
    {"PostNormWithoutFp32Residual",
     "--norm-placement post with --fp32-residual-connection is not built",
     [](auto& c) { c.norm_placement = NormPlacement::kPost, c.fp32_residual_connection = true; }},
    {"ResidualNormWithoutFp32Residual",
     "--norm-placement residual with --fp32-residual-connection is not built",
     [](auto& c) { c.norm_placement = kResidualPlacement, c.fp32_residual_connection = true; }},
    {"ResidualNormWithoutMtp", "--norm-placement residual with --mtp-num-layers is not built",
     [](auto& c) { c.norm_placement = kResidualPlacement, c.mtp_num_layers = 1; }},
    {"ParallelResidualIsPreNorm",
     "--parallel-residual with norms on the output of branches is not built\nhint: "
     "--norm-placement pre",
     [](auto& c) { c.norm_placement = NormPlacement::kSandwich, c.parallel_residual = true; }},
    {"QueryScalarIsPositive", "--query-pre-attn-scalar 0 must be positive",
     [](auto& c) { c.query_pre_attn_scalar = 0.0; }},
    {"EmbeddingMultiplierIsNotZero",
     "--embedding-multiplier 0 is not a number other than 0\nhint: 1: not multiplied",
     [](auto& c) { c.embedding_multiplier = 0.0; }},
    {"OneMultiplierOfEmbeddings",
     "--scale-embeddings and --embedding-multiplier both multiply embeddings\nhint: leave one of "
     "them out",
     [](auto& c) { c.scale_embeddings = true, c.embedding_multiplier = 2.0; }},
    {"LogitsScalingIsPositive", "--logits-scaling -1 must be positive\nhint: 1: not divided",
     [](auto& c) { c.logits_scaling = -1.0; }},
    {"AttentionSoftcapFromZero", "--attn-logit-softcapping -1 is negative\nhint: 0: none",
     [](auto& c) { c.attn_logit_softcapping = -1.0; }},
    {"FinalSoftcapFromZero", "--final-logit-softcapping -1 is negative\nhint: 0: none",
     [](auto& c) { c.final_logit_softcapping = -1.0; }},
    {"SoftcapNeedsItsBackend",
     "--attention-backend flash and fused do not compute --attn-logit-softcapping\nhint: "
     "--attention-backend auto",
     [](auto& c) {
       c.attn_logit_softcapping = 3.0, c.attention_backend = AttentionBackend::kFlash;
     }},
    {"LoraRankFromZero", "--lora-rank -1 is negative\nhint: 0: none",
     [](auto& c) { c.lora_rank = -1; }},
    {"LoraAlphaNeedsRank", "--lora-alpha and --lora-targets have an effect only with --lora-rank",
     [](auto& c) { c.lora_alpha = 2.0; }},
    {"LoraAlphaIsPositive", "--lora-alpha 0 must be positive",
     [](auto& c) { c.lora_rank = 1, c.lora_alpha = 0.0; }},
    {"LoraTargetIsKnown",
     "--lora-targets queries is not known\n"
     "hint: targets: linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, "
     "linear_fc1_up, linear_fc2, linear_qkv, linear_fc1, q_proj, k_proj, v_proj, "
     "o_proj, gate_proj, up_proj, down_proj, query, key, value, q, k, v, o, wi, "
     "wi_0, wi_1, wo, all-linear; of latent attention "
     "linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, "
     "linear_kv_up_proj; of Mamba-2 layers and gated delta nets in_proj, out_proj; "
     "the modules dense of a BERT are linear_proj, linear_fc1 and linear_fc2",
     [](auto& c) { c.lora_rank = 1, c.lora_targets = {"queries"}; }},
    {"LoraTargetsDoNotOverlap",
     "--lora-targets linear_qkv and linear_v would adapt the same rows\nhint: give one of them",
     [](auto& c) { c.lora_rank = 1, c.lora_targets = {"v_proj", "linear_qkv"}; }},
    {"LoraTargetNeedsAGate",
     "--lora-targets linear_fc1_up: the MLP of this model is not gated\nhint: linear_fc1",
     [](auto& c) { c.lora_rank = 1, c.lora_targets = {"up_proj"}; }},
};

class TransformerRules : public testing::TestWithParam<BrokenRule> {};

TEST_P(TransformerRules, IsReportedAlone) {
  TransformerConfig config = valid_config();
  GetParam().change(config);
  EXPECT_THAT(violations_of(config), ElementsAre(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(Each, TransformerRules, testing::ValuesIn(kBrokenRules),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TransformerConfig, ReportsNothingOfAValidConfiguration) {
  EXPECT_THAT(violations_of(valid_config()), IsEmpty());
}

// The rules of a topic in their order, topics as they are listed, rules between topics last.
TEST(TransformerConfig, ReportsEveryBrokenRuleAtOnce) {
  TransformerConfig config = valid_config();
  std::vector<std::string> messages;
  for (const char* name : {"MlpHasAWidth", "PositionsCoverTheSequence", "RotaryPercentInRange",
                           "HiddenDropoutBelowOne", "SeedIsPositive", "LocalBaseNeedsAWindow"}) {
    const auto rule =
        std::find_if(kBrokenRules.begin(), kBrokenRules.end(),
                     [&](const BrokenRule& r) { return r.name == std::string(name); });
    ASSERT_NE(rule, kBrokenRules.end()) << name;
    rule->change(config);
    messages.push_back(rule->message);
  }
  EXPECT_THAT(violations_of(config), testing::ElementsAreArray(messages));
}

// A part of the code that needs one topic takes that topic alone.
TEST(TransformerConfig, IsEachOfItsTopics) {
  TransformerConfig config = valid_config();
  config.window_size = {8, 0};
  config.rotary_percent = 0.5;
  config.kv_channels = 16;
  const AttentionConfig attention = config;
  const PositionConfig& position = config;
  EXPECT_THAT(attention.window(1), ElementsAre(8, 0));
  EXPECT_EQ(position.rotary_width(config), 8);
}

TEST(TransformerConfig, HeadsOfAnyWidthAreLegal) {
  TransformerConfig config = valid_config();
  config.kv_channels = 24;
  EXPECT_THAT(violations_of(config), IsEmpty());
  config.hidden_size = 66;
  EXPECT_THAT(violations_of(config), IsEmpty());
}

TEST(TransformerConfig, ActivationByFlags) {
  using Change = std::function<void(TransformerConfig&)>;
  const std::vector<std::pair<Activation, Change>> cases = {
      {Activation::kGeluTanh, [](auto&) {}},  // the fused kernel's
      {Activation::kGelu, [](auto& c) { c.bias_gelu_fusion = false; }},
      {Activation::kGelu, [](auto& c) { c.add_bias_linear = false; }},
      {Activation::kGeluTanh, [](auto& c) { c.add_bias_linear = false, c.openai_gelu = true; }},
      {Activation::kSwiglu, [](auto& c) { c.swiglu = true; }},
      {Activation::kGeglu, [](auto& c) { c.geglu = true; }},
      {Activation::kQuickGeglu, [](auto& c) { c.quick_geglu = true; }},
      {Activation::kExactGeglu, [](auto& c) { c.exact_geglu = true; }},
      {Activation::kQuickGelu, [](auto& c) { c.quick_gelu = true; }},
      {Activation::kRelu, [](auto& c) { c.relu = true; }},
      {Activation::kSquaredRelu, [](auto& c) { c.squared_relu = true; }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    TransformerConfig config = valid_config();
    cases[i].second(config);
    EXPECT_EQ(static_cast<int>(config.activation()), static_cast<int>(cases[i].first)) << i;
  }
}

TEST(TransformerConfig, WindowsByLayer) {
  TransformerConfig config = valid_config();
  const std::vector<int64_t> window = {8, 0}, full;
  const auto windows = [&] {
    std::vector<std::vector<int64_t>> all;
    for (int64_t layer = 1; layer <= 4; ++layer) all.push_back(config.window(layer));
    return all;
  };
  EXPECT_THAT(windows(), ElementsAre(full, full, full, full));
  config.window_size = window;
  EXPECT_THAT(windows(), ElementsAre(window, window, window, window));
  config.window_attn_skip_freq = "2";
  EXPECT_THAT(windows(), ElementsAre(window, full, window, full));
  config.window_attn_skip_freq = "3";
  EXPECT_THAT(windows(), ElementsAre(window, window, full, window));
  config.window_attn_skip_freq = "[1, 0, 0, 1]";
  EXPECT_THAT(violations_of(config), IsEmpty());
  EXPECT_THAT(windows(), ElementsAre(window, full, full, window));
}

TEST(TransformerConfig, LawsOfInitialisation) {
  TransformerConfig config = valid_config();
  const auto expect = [](const Init& init, Init::Kind kind, double std) {
    EXPECT_EQ(static_cast<int>(init.kind), static_cast<int>(kind));
    EXPECT_DOUBLE_EQ(init.std, std);
  };
  expect(config.weight_init(10, 20), Init::Kind::kNormal, 0.02);
  expect(config.weight_init(10, 20, /*output=*/true), Init::Kind::kNormal, 0.02 / std::sqrt(8.0));
  expect(config.embedding_init(100), Init::Kind::kNormal, 0.02);
  config.embedding_init_method_std = 0.5;
  expect(config.embedding_init(100), Init::Kind::kNormal, 0.5);
  config.init_method_xavier_uniform = true;
  expect(config.weight_init(10, 20), Init::Kind::kUniform, std::sqrt(6.0 / 30.0));
  expect(config.weight_init(10, 20, /*output=*/true), Init::Kind::kUniform, std::sqrt(6.0 / 30.0));
  expect(config.embedding_init(100), Init::Kind::kNormal, 0.5);
  config.embedding_init_method_std.reset();
  expect(config.embedding_init(100), Init::Kind::kUniform, std::sqrt(6.0 / 164.0));
}

// -- rotary angles

TransformerConfig rotary_config() {
  TransformerConfig config = valid_config();
  config.kv_channels = 8;
  config.rotary_base = 100;
  config.finalize();
  return config;
}

// Expects cos and sin of position * frequency.
void expect_angles(const TransformerConfig& config, const std::vector<double>& frequencies,
                   double stretch = 1.0) {
  const RotaryEmbedding rotary(config);
  const at::Tensor positions = at::tensor({0, 1, 7, 31, 1000}, at::kLong);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const RotaryTables tables = rotary.tables(positions, type).all;
    EXPECT_EQ(tables.cos.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
    ASSERT_EQ(tables.cos.sizes(),
              (std::vector<int64_t>{5, static_cast<int64_t>(frequencies.size())}));
    EXPECT_EQ(tables.interleaved, config.rotary_interleaved);
    for (int64_t p = 0; p < 5; ++p) {
      for (size_t i = 0; i < frequencies.size(); ++i) {
        const double position = positions[p].item<double>(),
                     angle = position / stretch * frequencies[i];
        const double tolerance =
            type == at::kDouble ? 1e-12 * (1.0 + position) : 3e-7 * (1.0 + position);
        EXPECT_NEAR(tables.cos[p][static_cast<int64_t>(i)].item<double>(), std::cos(angle),
                    tolerance)
            << p << " " << i;
        EXPECT_NEAR(tables.sin[p][static_cast<int64_t>(i)].item<double>(), std::sin(angle),
                    tolerance)
            << p << " " << i;
      }
    }
  }
}

TEST(RotaryEmbedding, FrequenciesFallGeometrically) {
  TransformerConfig config = rotary_config();
  expect_angles(config, {1.0, 1.0 / std::sqrt(10.0), 0.1, 0.1 / std::sqrt(10.0)});
  config.rotary_interleaved = true;
  config.rotary_percent = 0.5;  // of 8: two frequencies
  expect_angles(config, {1.0, 0.1});
}

TEST(RotaryEmbedding, InterpolationDividesPositions) {
  TransformerConfig config = rotary_config();
  config.rotary_seq_len_interpolation_factor = 3;
  config.rotary_percent = 0.5;
  expect_angles(config, {1.0, 0.1}, 3.0);
}

TEST(RotaryEmbedding, Llama3ScalesLongWavelengths) {
  TransformerConfig config = rotary_config();
  config.use_rope_scaling = true;
  config.rope_scaling_factor = 4.0;
  config.finalize();
  EXPECT_EQ(config.rope_scaling_type, RopeScaling::kLlama3);
  config.rotary_base = 100000000;  // frequencies 1, 1e-2, 1e-4, 1e-6
  // Wavelengths 6.3 and 628 are below 8192 / 4 and kept; 62832 and more are above 8192 and divided.
  expect_angles(config, {1.0, 1e-2, 1e-4 / 4.0, 1e-6 / 4.0});
  config.kv_channels = 4;
  config.rotary_base = 250000;  // 1 and 0.002: wavelength 3142 lies between
  const double smooth = (8192.0 / (2.0 * std::numbers::pi / 0.002) - 1.0) / 3.0;
  expect_angles(config, {1.0, (1.0 - smooth) * 0.002 / 4.0 + smooth * 0.002});
}

// Heads of 8. Of a token at (3, 4, 5) with sections 1 1 2, as Qwen 2-VL's language model has them;
// and of a patch in row 1 and column 2, whose sections begin anew, as its encoder has them.
TEST(RotaryEmbedding, SectionsHavePositionsOfTheirOwn) {
  const auto expect = [](std::vector<int64_t> section, bool anew, std::vector<int64_t> position,
                         const std::vector<double>& angles) {
    TransformerConfig config = rotary_config();
    config.rotary_base = 10000;
    config.sections_begin_anew = anew;
    config.mrope_section = std::move(section);
    const at::Tensor at = at::tensor(position, at::kLong).view({1, 1, -1});
    const RotaryTables tables = RotaryEmbedding(config).tables(at, at::kDouble).all;
    ASSERT_EQ(tables.cos.sizes(), (std::vector<int64_t>{1, 1, 4}));
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(tables.cos[0][0][i].item<double>(), std::cos(angles[i]), 1e-12) << i;
      EXPECT_NEAR(tables.sin[0][0][i].item<double>(), std::sin(angles[i]), 1e-12) << i;
    }
  };
  expect({1, 1, 2}, false, {3, 4, 5}, {3, 0.4, 0.05, 0.005});
  expect({2, 2}, true, {1, 2}, {1, 0.01, 2, 0.02});
}

TEST(RotaryEmbedding, YarnIsAlsoAKindOfPositions) {
  TransformerConfig config = rotary_config();
  config.position_embedding_type = PositionEmbedding::kYarn;
  config.finalize();
  EXPECT_EQ(config.position_embedding_type, PositionEmbedding::kRope);
  EXPECT_EQ(config.rope_scaling_type, RopeScaling::kYarn);
}

TEST(RotaryEmbedding, LongRopeDecidesByRow) {
  TransformerConfig config = rotary_config();
  config.rope_scaling_type = RopeScaling::kLongRope;
  config.rope_original_max_position_embeddings = 16;
  config.rope_scaling_factor = 1.0;
  config.longrope_short_factor = {1.0, 1.0, 2.0, 2.0};
  config.longrope_long_factor = {4.0, 4.0, 8.0, 8.0};
  const RotaryEmbedding rotary(config);
  const at::Tensor rows = at::tensor({13, 14, 15, 14, 15, 16}, at::kLong).view({2, 3});
  const RotaryTables tables = rotary.tables(rows, at::kDouble).all;
  const auto angle = [&](int64_t s, int64_t row) {
    return std::atan2(tables.sin[s][row][0].item<double>(), tables.cos[s][row][0].item<double>());
  };
  EXPECT_NEAR(angle(2, 0), 15.0 - 4 * std::numbers::pi, 1e-9)
      << "16 positions are within the original length";
  EXPECT_NEAR(angle(0, 1), 14.0 / 4.0 - 2 * std::numbers::pi, 1e-9)
      << "17 are not, which counts for all of them";
}

TEST(RotaryEmbedding, LocalLayersAreNotScaled) {
  TransformerConfig config = rotary_config();
  config.rotary_base_local = 10000;
  config.rope_scaling_type = RopeScaling::kLinear;
  config.rope_scaling_factor = 2.0;
  const LayerRotary rotary = RotaryEmbedding(config).tables(at::arange(3), at::kDouble);
  EXPECT_NEAR(rotary.of(false).sin[1][0].item<double>(), std::sin(0.5), 1e-12);
  EXPECT_NEAR(rotary.of(true).sin[1][0].item<double>(), std::sin(1.0), 1e-12);
  EXPECT_NEAR(rotary.of(true).sin[1][2].item<double>(), std::sin(0.01), 1e-12);
}

TEST(RotaryEmbedding, PositionsByRow) {
  const TransformerConfig config = rotary_config();
  const RotaryEmbedding rotary(config);
  const at::Tensor rows = at::tensor({0, 1, 2, 5, 6, 7}, at::kLong).view({2, 3});
  const RotaryTables tables = rotary.tables(rows, at::kDouble).all;
  ASSERT_EQ(tables.cos.sizes(), (std::vector<int64_t>{3, 2, 4}));
  for (int64_t row = 0; row < 2; ++row) {
    const RotaryTables alone = rotary.tables(rows[row], at::kDouble).all;
    EXPECT_TRUE(at::equal(tables.cos.select(1, row), alone.cos));
    EXPECT_TRUE(at::equal(tables.sin.select(1, row), alone.sin));
  }
  EXPECT_TRUE(tables.cos.is_contiguous() && tables.sin.is_contiguous())
      << "kernels read them row by row";
}

TEST(TransformerConfig, APatternNamesTheKindsOfLayers) {
  TransformerConfig config;
  EXPECT_EQ(config.layer_letters(1), "*-");
  EXPECT_EQ(config.layer_letters(7), "*-");
  config.layer_pattern = "M,*-,E";
  const char* const expected[] = {"M", "*-", "E", "M", "*-"};
  for (int64_t layer = 1; layer <= 5; ++layer)
    EXPECT_EQ(config.layer_letters(layer), expected[layer - 1]) << layer;
}

}  // namespace
}  // namespace megatron
