// Multi-latent attention: published vectors of scale, frequencies and a small layer; decoding from
// latents; what its configuration refuses.
#include "megatron/transformer/attention/multi_latent_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "megatron/transformer/attention/multi_latent_attention_cost.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "tests/unit/forwarding_backend.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ragged_steps.h"

namespace megatron {
namespace {

TransformerConfig deepseek(double factor, double mscale, double mscale_all_dim) {
  TransformerConfig config;
  config.multi_latent_attention = true;
  config.position_embedding_type = PositionEmbedding::kRope;
  config.rope_original_max_position_embeddings = 4096;
  config.rotary_scaling_factor = factor;
  config.mscale = mscale;
  config.mscale_all_dim = mscale_all_dim;
  return config;
}

double first_cosine(const TransformerConfig& config) {
  const LayerRotary rotary = RotaryEmbedding(config).tables(at::zeros({1}, at::kLong), at::kDouble);
  return rotary.all.cos[0][0].item<double>();
}

// Scales and factors of cosines of DeepSeek-V3 and DeepSeek-V2-Lite.
TEST(MultiLatentAttention, MagnitudesOfYarn) {
  const TransformerConfig v3 = deepseek(40, 1, 1);
  EXPECT_NEAR(v3.softmax_scale(), .135233779, 1e-9);
  EXPECT_NEAR(first_cosine(v3), 1.0, 1e-12);
  const TransformerConfig lite = deepseek(40, .707, .707);
  EXPECT_NEAR(std::sqrt(lite.score_magnitude()), 1.260803777, 1e-9);
  EXPECT_NEAR(lite.softmax_scale(), .114721387, 1e-9);
  EXPECT_NEAR(first_cosine(lite), 1.0, 1e-12);
  const TransformerConfig none = deepseek(40, 1, 0);
  EXPECT_NEAR(none.softmax_scale(), .072168784, 1e-9);
  EXPECT_NEAR(first_cosine(none), 1.368887945, 1e-9);
  TransformerConfig plain = deepseek(1, 1, 1);
  EXPECT_NEAR(plain.softmax_scale(), .072168784, 1e-9);
  EXPECT_EQ(first_cosine(plain), 1.0);
  plain.rope_type = LatentRope::kRope;
  EXPECT_NEAR(plain.softmax_scale(), .072168784, 1e-9);
}

TEST(MultiLatentAttention, FrequenciesOfYarn) {
  const TransformerConfig config = deepseek(40, 1, 1);
  const at::Tensor f = RotaryEmbedding(config).frequencies(8192);
  ASSERT_EQ(f.size(0), 32);
  const std::pair<int64_t, double> expected[] = {
      {0, 1.0},           {10, 5.623413252e-2}, {11, 3.900692657e-2},
      {16, 5.5e-3},       {22, 1.77827941e-4},  {23, 3.33380358e-5},
      {31, 3.33380358e-6}};
  for (const auto& [i, value] : expected) EXPECT_NEAR(f[i].item<double>() / value, 1.0, 1e-8) << i;
}

// w[r][c] = ((7 r + 3 c + offset) mod 11 - 5) / 10
at::Tensor pattern(int64_t rows, int64_t columns, int64_t offset) {
  const at::Tensor r = at::arange(rows, at::kLong).unsqueeze(1),
                   c = at::arange(columns, at::kLong).unsqueeze(0);
  return ((7 * r + 3 * c + offset).remainder(11) - 5).to(at::kDouble) / 10.0;
}

// Three tokens of width 4, two heads, no latent of queries, no norm of the input.
struct SmallLayer {
  SmallLayer() : config(configuration()), layer(config, 1, false, one), store(make()) {}
  static TransformerConfig configuration() {
    TransformerConfig config;
    config.num_layers = 1;
    config.hidden_size = 4;
    config.num_attention_heads = 2;
    config.seq_length = 3;
    config.multi_latent_attention = config.qk_layernorm = true;
    config.kv_lora_rank = 3;
    config.qk_head_dim = 2;
    config.qk_pos_emb_head_dim = 4;
    config.v_head_dim = 2;
    config.normalization = Normalization::kRMSNorm;
    config.norm_placement = NormPlacement::kPost;
    config.layernorm_epsilon = 1e-6;
    config.add_bias_linear = false;
    config.position_embedding_type = PositionEmbedding::kRope;
    config.attention_dropout = config.hidden_dropout = 0.0;
    config.finalize();
    return config;
  }
  std::unique_ptr<PlainParameterStore> make() {
    auto made = std::make_unique<PlainParameterStore>(layer, at::kDouble, at::kCPU, true);
    layer.visit([](const std::string& name, Parameter& parameter) {
      const at::Tensor& value = parameter.value;
      if (name == "linear_q_proj.weight") value.copy_(pattern(12, 4, 0));
      if (name == "linear_kv_down_proj.weight") value.copy_(pattern(7, 4, 1));
      if (name == "linear_kv_up_proj.weight") value.copy_(pattern(8, 3, 2));
      if (name == "linear_kv_up_proj.layer_norm_weight") value.fill_(1.0);
      if (name == "linear_proj.weight") value.copy_(pattern(4, 4, 3));
    });
    return made;
  }
  at::Tensor run() { return run(context_of(3, 1), x, nullptr); }
  // Rows [first, first + count) of the sequence, with the cache of those before.
  at::Tensor decode(int64_t first, int64_t count, LayerState& state) {
    DecodingState none;
    const RaggedBatch batch = RaggedSteps(1, 3, /*block_size=*/2).batch({{0, first, count}});
    const DecodingPass decoding{none, batch};
    return run(RaggedSteps::context_of(decoding), x.narrow(0, first, count), &state);
  }
  at::Tensor run(const ForwardContext& pass, const at::Tensor& rows, LayerState* state) {
    const LayerContext context{
        pass, RotaryEmbedding(config).tables(pass.place.position, at::kDouble), false, state};
    return layer.forward(rows.unsqueeze(1), context, false).output.squeeze(1);
  }

  const at::Tensor x =
      at::tensor({.5, -1., .25, 1., 1., .5, -.5, 0., -.75, .25, 1., .5}, at::kDouble).view({3, 4});
  const at::Tensor expected =
      at::tensor({-.94164105, .89344682, .02687755, -.98751824, -.33149838, .49603389, -.0352322,
                  -.4389991, -.22960863, .22211951, .03392834, -.24701853},
                 at::kDouble)
          .view({3, 4});
  const ParallelGroups one;
  const TransformerConfig config;
  MultiLatentAttention layer;
  const std::unique_ptr<PlainParameterStore> store;
};

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(MultiLatentAttention, EqualsTheFormula) {
  SmallLayer small;
  EXPECT_LT(difference(small.run(), small.expected), 1e-7);
}

// Single tokens read latents, with the up projections absorbed; chunks expand them.
TEST(MultiLatentAttention, DecodesFromLatents) {
  const at::NoGradGuard no_grad;
  SmallLayer small;
  const at::Tensor whole = small.run();
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{1, 1, 1}, {2, 1}, {1, 2}, {3}}) {
    const std::unique_ptr<LayerState> state = small.layer.make_state();
    std::vector<at::Tensor> parts;
    int64_t first = 0;
    for (const int64_t count : counts) {
      parts.push_back(small.decode(first, count, *state));
      first += count;
    }
    EXPECT_LT(difference(at::cat(parts), whole), 1e-12) << counts.size();
    EXPECT_EQ(state->paged()[0]->bytes(), 2 * 2 * 7 * 8) << "two blocks of two positions";
    const RaggedBatch batch = RaggedSteps(1, 3, 2).batch({{0, 0, 3}});
    const at::Tensor latents =
        state->paged()[0]->gather(batch.rows, batch.rows.parts()[0]).squeeze(1);
    const at::Tensor expected =
        at::tensor(
            {.83413085,   1.29753688, -.78779025, .375,       -.5,        -.475,      .85,
             -1.53033243, .41736339,  -.69560565, -.85607909, -.35348244, -.22277476, .34648256,
             1.25495085,  -.86548335, .82220918,  .03542989,  .3809246,   .70355861,  -.2924405},
            at::kDouble)
            .view({3, 7});
    EXPECT_LT(difference(latents, expected), 1e-7);
  }
}

// Each gives back memory and changes no bit, alone and with offloading of what remains saved.
TEST(MultiLatentAttention, RecomputationChangesNoBit) {
  using Names = std::vector<std::string>;
  for (const bool latent_queries : {true, false}) {
    TransformerConfig config = latent_config();
    if (!latent_queries) config.q_lora_rank.reset();
    const at::Tensor x = draw({8, 2, 32}, 1), dy = draw({8, 2, 32}, 2);
    const WholePass plain = run(config, x, dy, context_of(8, 2));
    config.recompute_granularity = RecomputeGranularity::kSelective;
    for (const Names& modules : {Names{"layernorm"},
                                 {"mla_up_proj"},
                                 {"mla_up_proj", "core_attn"},
                                 {"mla_up_proj", "layernorm"}}) {
      config.recompute_modules = modules;
      expect_identical(plain, run(config, x, dy, context_of(8, 2)), modules.back());
      TransformerConfig offloaded = config;
      offloaded.fine_grained_activation_offloading = true;
      offloaded.offload_modules = {"attn_norm", "attn_proj"};
      offloaded.min_offloaded_tensor_size = 0;
      ActivationOffload offload(c10::kCPU, {0, 1});
      expect_identical(plain, run(offloaded, x, dy, context_of(8, 2), true, &offload),
                       cat("offloaded, with ", modules.back()));
      EXPECT_GT(offload.counts().bytes_to_host, 0);
    }
  }
}

TEST(MultiLatentAttention, BlockDecodesAsItTrains) {
  const at::NoGradGuard no_grad;
  for (const bool latent_queries : {true, false}) {
    TransformerConfig config = latent_config();
    if (!latent_queries) config.q_lora_rank.reset();
    config.v_head_dim = latent_queries ? 8 : 12;  // narrower and wider than keys
    const ParallelGroups one;
    TransformerBlock block(config, 0, config.num_layers, true, false, one);
    PlainParameterStore store(block, at::kDouble, at::kCPU, false);
    initialize_parameters(block, 3, one);
    const at::Tensor x = draw({9, 2, 32}, 1);
    const at::Tensor whole = block.forward(x, context_of(9, 2));
    RaggedSteps steps(2, 9, /*block_size=*/4);
    for (const std::vector<StepPart>& parts :
         std::vector<std::vector<StepPart>>{{{0, 0, 5}, {1, 0, 4}},
                                            {{0, 5, 1}, {1, 4, 2}},
                                            {{1, 6, 1}, {0, 6, 2}},
                                            {{0, 8, 1}, {1, 7, 2}}}) {
      const std::vector<at::Tensor> y = steps.forward(block, x, parts);
      for (size_t i = 0; i < parts.size(); ++i)
        EXPECT_LT(
            difference(
                y[i], whole.select(1, parts[i].sequence).narrow(0, parts[i].first, parts[i].count)),
            1e-11)
            << parts[i].sequence << " at " << parts[i].first;
    }
    EXPECT_EQ(steps.state.bytes(), 3 * steps.pool_positions() * (10 + 4) * 8);
  }
}

// Counts what a ring would send.
class TensorBytesBackend final : public ForwardingBackend {
 public:
  TensorBytesBackend(std::shared_ptr<Backend> inner, double* bytes)
      : ForwardingBackend(std::move(inner)), bytes_(bytes) {}
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    *bytes_ += 2 * scatter_bytes(size(), static_cast<double>(tensor.nbytes()));
    return ForwardingBackend::all_reduce(tensor, op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(output.nbytes()));
    return ForwardingBackend::all_gather(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(input.nbytes()));
    return ForwardingBackend::reduce_scatter(output, input, op);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    const auto row = static_cast<int64_t>(input.nbytes()) / input.size(0);
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank())
        *bytes_ += static_cast<double>(input_sizes[static_cast<size_t>(peer)] * row);
    return ForwardingBackend::all_to_all(output, std::move(output_sizes), input,
                                         std::move(input_sizes));
  }

 private:
  double* bytes_;
};

TEST(MultiLatentAttention, SendsWhatThePlanSays) {
  for (const bool latent_queries : {true, false})
    for (const bool sequence_parallel : {false, true}) {
      SCOPED_TRACE(cat("latent queries ", latent_queries, ", sequence ", sequence_parallel));
      TransformerConfig config = latent_config();
      if (!latent_queries) config.q_lora_rank.reset();
      config.norm_placement = NormPlacement::kPost;  // the norm before it is the layer's
      LayerShape shape;
      shape.samples = 2;
      shape.tokens = 16;
      shape.rows = sequence_parallel ? 8 : 16;
      shape.element = shape.residual = shape.sum = 8;
      shape.tensor = 2;
      shape.sequence_parallel = sequence_parallel;
      shape.on_gpu = false;
      const Traffic planned = multi_latent_attention_cost(config, 1, shape, false).tensor;
      run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
        double bytes = 0;
        ParallelGroups groups;
        groups.tp = ProcessGroup(std::make_shared<TensorBytesBackend>(backend, &bytes), "tp");
        MultiLatentAttention layer(config, 1, sequence_parallel, groups);
        PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
        initialize_parameters(layer, 3, groups);
        const at::Tensor x = draw({shape.rows / 2, 2, 32}, 1).set_requires_grad(true);
        const ForwardContext pass = context_of(8, 2);
        const LayerContext context{
            pass, RotaryEmbedding(config).tables(pass.place.position, at::kDouble)};
        const at::Tensor y = layer.forward(x, context, /*add=*/false).output;
        EXPECT_EQ(bytes, planned.forward);
        torch::autograd::backward({y.sum()}, {});
        EXPECT_EQ(bytes, planned.forward + planned.backward);
      });
    }
}

TransformerConfig given_config() {
  TransformerConfig config = latent_config();
  config.kv_channels = 0;
  return config;
}

std::vector<std::string> latent_violations(TransformerConfig config) {
  config.finalize();
  Violations violations;
  config.validate(violations);
  return violations.messages();
}

TEST(MultiLatentAttention, AValidConfigurationBreaksNoRule) {
  EXPECT_THAT(latent_violations(given_config()), testing::IsEmpty());
}

struct LatentRule {
  const char* name;
  const char* message;
  void (*change)(TransformerConfig&);
};

const std::vector<LatentRule> kLatentRules = {
    {"LatentsHaveAWidth", "--kv-lora-rank 0 must be positive", [](auto& c) { c.kv_lora_rank = 0; }},
    {"RotatedFeaturesArePairs",
     "--qk-pos-emb-head-dim 5: rotated features come in pairs, a positive even number",
     [](auto& c) { c.qk_head_dim = 5, c.qk_pos_emb_head_dim = 5; }},
    {"NoWidthOfItsOwn",
     "--kv-channels 8 with --multi-latent-attention, whose query heads have --qk-head-dim + "
     "--qk-pos-emb-head-dim = 10 features\nhint: leave --kv-channels out",
     [](auto& c) { c.kv_channels = 8; }},
    {"NoGroups",
     "--group-query-attention cannot be used with --multi-latent-attention, whose heads share one "
     "latent\nhint: leave --group-query-attention out",
     [](auto& c) { c.group_query_attention = true; }},
    {"FactorNeedsYarn", "--rotary-scaling-factor has an effect only with --rope-type yarn",
     [](auto& c) { c.rope_type = LatentRope::kRope; }},
    {"FactorStretches", "--rotary-scaling-factor 0.5 is below 1",
     [](auto& c) { c.rotary_scaling_factor = 0.5; }},
    {"NotInterleaved",
     "--rotary-interleaved cannot be used with --multi-latent-attention, which sorts the pairs "
     "into halves before it rotates",
     [](auto& c) { c.rotary_interleaved = true; }},
    {"RotatesByItsOwnWidth",
     "--rotary-percent has no effect with --multi-latent-attention\nhint: --qk-pos-emb-head-dim "
     "says how many features are rotated",
     [](auto& c) { c.rotary_percent = 0.6; }},
    {"NeedsRotaryPositions",
     "--multi-latent-attention rotates queries and keys, which --position-embedding-type must "
     "say\nhint: --position-embedding-type rope",
     [](auto& c) { c.position_embedding_type = PositionEmbedding::kLearnedAbsolute; }},
    {"ScalingOfOtherAttention",
     "--rope-scaling-type and --rope-attention-factor are of other attention than "
     "--multi-latent-attention\nhint: --rope-type yarn --rotary-scaling-factor, --mscale and "
     "--mscale-all-dim",
     [](auto& c) { c.rope_scaling_type = RopeScaling::kLlama3; }},
    {"EpsilonNeedsNorms", "--latent-norm-epsilon has an effect only with --qk-layernorm",
     [](auto& c) { c.latent_norm_epsilon = 1e-6, c.qk_layernorm = false; }},
    {"NoNormOverHeads",
     "--qk-layernorm-over-heads has no effect with --multi-latent-attention, which norms "
     "latents\nhint: --qk-layernorm alone",
     [](auto& c) { c.qk_layernorm_over_heads = true; }},
    {"NoBiases",
     "--add-qkv-bias: the projections of --multi-latent-attention have no biases\nhint: leave it "
     "out",
     [](auto& c) { c.add_qkv_bias = true; }},
    {"ScaleFollows",
     "--query-pre-attn-scalar has no effect with --multi-latent-attention, whose scale follows "
     "from its head sizes and --mscale-all-dim\nhint: leave it out",
     [](auto& c) { c.query_pre_attn_scalar = 6; }},
    {"UpProjectionsAreNotOffloaded",
     "--offload-modules core_attn has no effect: --recompute-modules mla_up_proj does not save "
     "it\nhint: leave it out",
     [](auto& c) {
       c.recompute_granularity = RecomputeGranularity::kSelective;
       c.recompute_modules = {"mla_up_proj"};
       c.fine_grained_activation_offloading = true;
       c.offload_modules = {"core_attn"};
     }},
    {"WithoutIt",
     "--q-lora-rank, --kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim, "
     "--latent-norm-epsilon, --rope-type, --rotary-scaling-factor, --mscale and --mscale-all-dim "
     "have an effect only with --multi-latent-attention\nhint: --rope-scaling-type scales the "
     "rotary positions of other attention",
     [](auto& c) { c.multi_latent_attention = false; }},
};

class LatentRules : public testing::TestWithParam<LatentRule> {};

TEST_P(LatentRules, IsReportedAlone) {
  TransformerConfig config = given_config();
  GetParam().change(config);
  EXPECT_THAT(latent_violations(config), testing::ElementsAre(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(Each, LatentRules, testing::ValuesIn(kLatentRules),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
