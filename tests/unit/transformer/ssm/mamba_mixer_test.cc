// The Mamba-2 sublayer: a published vector; tensor, sequence and context parallelism against one
// rank; packed documents; decoding in slices; recomputation; what its sizes refuse.
#include "megatron/transformer/ssm/mamba_mixer.h"

#include <gmock/gmock.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tests/unit/error_of.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ragged_steps.h"
#include "tests/unit/transformer/ssm/mixer_cases.h"
#include "tests/unit/transformer/ssm/mixer_config.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

void set(Parameter& parameter, const at::Tensor& value) {
  parameter.value.copy_(value.view(parameter.local_shape));
}

MixerRun vector_case() {
  TransformerConfig config = mixer_config(4, 2);
  config.hidden_size = 4;
  config.mamba_state_dim = 3;
  config.norm_placement = NormPlacement::kPost;  // no norm of the input
  return {config, u(30, {7, 4}).unsqueeze(1), u(40, {7, 4}).unsqueeze(1),
          ids({0, 0, 0, 1, 1, 1, 1})};
}

void set_vector(const std::string& name, Parameter& parameter) {
  if (name == "in_proj.weight") set(parameter, 0.5 * u(21, {32, 4}));
  if (name == "conv1d_weight") set(parameter, 0.5 * u(22, {20, 4}));
  if (name == "conv1d_bias") set(parameter, 0.1 * u(23, {20}));
  if (name == "dt_bias") set(parameter, 0.5 * u(24, {4}) - 1);
  if (name == "A_log") set(parameter, 0.5 + 0.5 * u(25, {4}));
  if (name == "D") set(parameter, 1 + 0.25 * u(26, {4}));
  if (name == "norm.weight") set(parameter, 1 + 0.1 * u(27, {8}));
  if (name == "out_proj.weight") set(parameter, 0.5 * u(28, {4, 8}));
}

TEST(MambaMixer, Vector) {
  const MixerRun what = vector_case();
  const MixerPass pass = run_mixer<MambaMixer>(what, ParallelGroups(), false, set_vector);
  expect_vector(pass.y[6], {0.278244959546, 0.700095958119, 0.807696114054, 0.552747134412},
                "out of token 6");
  const auto summary = [](const at::Tensor& t) {
    const at::Tensor flat = t.reshape({-1});
    return at::stack({flat.sum(), (flat * flat).sum(), flat[0], flat[flat.numel() - 1]});
  };
  const at::Tensor loss = (pass.y * what.dy).sum();
  expect_vector(at::stack({pass.y.sum(), (pass.y * pass.y).sum(), loss}),
                {2.01169332088, 13.1540119066, 9.76603071582}, "out");
  const std::map<std::string, std::vector<double>> expected = {
      {"in_proj.weight", {26.2315181797, 195.357685083, 0.93588110649, -0.0042355823382}},
      {"conv1d_weight", {12.0725113128, 540.320880738, -0.583836316733, -0.0185636947961}},
      {"conv1d_bias", {20.3642662915, 1624.28920503, 14.2756551001, 0.0769981279302}},
      {"dt_bias", {0.00281014941857, 0.000160086275618, -0.00642147216611, -0.000572422282273}},
      {"A_log", {0.0120868668114, 0.000346549739076, -0.00410621384002, 0.0173823469537}},
      {"D", {0.386617806955, 2.29227690715, 0.439315732154, 1.09723416438}},
      {"norm.weight", {9.76396972415, 37.8543143176, 0.816471118561, -1.95895325487}},
      {"out_proj.weight", {7.47897184357, 98.7840104731, -0.441948355516, -2.19986799914}}};
  ASSERT_EQ(pass.grads.size(), expected.size());
  for (const auto& [name, numbers] : expected)
    expect_vector(summary(pass.grads.at(name)), numbers, name);
  expect_vector(summary(pass.dx), {3.37734404838, 41.3366230743, 0.556770252021, 0.80747958928},
                "X");
}

// Tokens 3 to 6 of the vector are a document: decoded, they leave the state that the vector says.
TEST(MambaMixer, StateOfTheVectorByDecoding) {
  const MixerRun what = vector_case();
  const ParallelGroups one;
  const at::NoGradGuard no_grad;
  MambaMixer mixer(what.config, 1, false, one);
  PlainParameterStore store(mixer, at::kDouble, at::kCPU, false);
  mixer.visit(set_vector);
  RecurrentState state;
  RaggedSteps steps(1, 4, 4);
  at::Tensor last;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 2}, {2, 1}, {3, 1}}) {
    const RaggedBatch batch = steps.batch({{0, first, count}});
    const DecodingPass decoding{steps.state, batch};
    const ForwardContext pass = RaggedSteps::context_of(decoding);
    last = mixer
               .forward(what.x.narrow(0, 3 + first, count), LayerContext{pass, {}, false, &state},
                        false)
               .output;
  }
  expect_vector(last, {0.278244959546, 0.700095958119, 0.807696114054, 0.552747134412},
                "out of token 6");
  expect_vector(state.slots()[1]->data()[0][3],
                {-0.00956584081083, 5.26288968595e-05, 0.014781614037, -0.00640035405176,
                 5.52925873862e-05, 0.0100990431685},
                "S_7 of head 3");
}

MixerRun drawn(int64_t heads, int64_t groups, int64_t s = 16) {
  return {mixer_config(heads, groups), draw({s, 2, 8}, 1), draw({s, 2, 8}, 2), {}};
}

// Groups of the norm, of B and of C that lie whole on ranks, or on several of them.
TEST(MambaMixer, HeadsOverTensorRanks) {
  for (const int64_t groups : {1, 2, 8})
    expect_heads_over_tensor_ranks<MambaMixer>(drawn(8, groups), {2, 4, 8},
                                               cat("groups ", groups, ", "));
}

TEST(MambaMixer, SegmentsOverContextRanks) {
  expect_segments_over_context_ranks<MambaMixer>(drawn(4, 2, 24));
}

TEST(MambaMixer, ShortSegmentsAndSharedGroups) {
  expect_short_segments<MambaMixer>(drawn(4, 1, 8));
}

TEST(MambaMixer, PackedDocumentsAreDocumentsAlone) {
  expect_packed_documents_are_documents_alone<MambaMixer>(drawn(4, 2, 20));
}

TEST(MambaMixer, DecodingInSlicesIsOnePass) {
  MixerRun what = drawn(4, 1, 12);
  what.config.mamba_dt_limit = {"0.02", "0.06"};
  expect_slices_are_one_pass<MambaMixer>(what);
}

// Chunks of 8 rows, three and a part; groups shared or not.
TEST(MambaMixer, ReplayedChunksHaveTheBitsOfTheForward) {
  for (const int64_t groups : {1, 4}) {
    TransformerConfig config = drawn(4, groups).config;
    config.mamba_chunk_size = 8;
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
      expect_bits_of_the_forward<MambaMixer>(config, 29, type);
  }
  TransformerConfig config = drawn(4, 2).config;
  expect_bits_of_the_forward<MambaMixer>(config, 150, at::kBFloat16);
}

TEST(MambaMixer, KeepsStatesInTheTypesGiven) {
  expect_states_of_types<MambaMixer>(drawn(4, 2).config, 40);
}

TEST(MambaMixer, RecomputedNorm) {
  for (const int t : {1, 2})
    run_ranks(t, [&](const std::shared_ptr<Backend>& world) {
      ParallelConfig parallel;
      parallel.tensor_model_parallel_size = t;
      expect_norm_again<MambaMixer>(drawn(4, 1), "mamba_norm",
                                    make_parallel_groups(parallel, world));
    });
}

TEST(MambaMixer, InitialValues) {
  const ParallelGroups one;
  const TransformerConfig config = mixer_config(512, 2);
  MambaMixer mixer(config, 1, false, one);
  PlainParameterStore store(mixer, at::kFloat, at::kCPU, false);
  initialize_parameters(mixer, 3, one);
  const auto between = [](const at::Tensor& t, double low, double high, double middle) {
    EXPECT_GE(t.min().item<double>(), low - 1e-6);
    EXPECT_LE(t.max().item<double>(), high + 1e-6);
    EXPECT_NEAR(t.mean().item<double>(), middle, (high - low) / 15 + 1e-6);
  };
  mixer.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& value = parameter.value;
    if (name == "conv1d_weight" || name == "conv1d_bias") between(value, -0.5, 0.5, 0.0);
    if (name == "A_log") between(at::exp(value), 1.0, 16.0, 8.5);
    if (name == "dt_bias")
      between(at::log(at::softplus(value)), std::log(1e-3), std::log(0.1), std::log(1e-2));
    if (name == "D" || name == "norm.weight") between(value, 1.0, 1.0, 1.0);
  });
}

// A model in bf16 keeps rates and time steps in fp32; its result is that of fp64 with the same
// weights, up to roundings of activations.
TEST(MambaMixer, Bf16) {
  const MixerRun what = drawn(8, 2, 64);
  const ParallelGroups one;
  MambaMixer narrow(what.config, 1, false, one), wide(what.config, 1, false, one);
  PlainParameterStore narrow_store(narrow, at::kBFloat16, at::kCPU, true),
      wide_store(wide, at::kDouble, at::kCPU, true);
  initialize_parameters(narrow, 3, one);
  std::map<std::string, at::Tensor> values;
  narrow.visit([&](const std::string& name, Parameter& parameter) {
    const bool fp32 = name == "A_log" || name == "dt_bias" || name == "D";
    EXPECT_EQ(parameter.value.scalar_type(), fp32 ? at::kFloat : at::kBFloat16) << name;
    values[name] = parameter.value.to(at::kDouble);
  });
  wide.visit([&](const std::string& name, Parameter& parameter) {
    parameter.value.copy_(values.at(name));
  });
  const at::Tensor x = what.x.to(at::kBFloat16);
  const ForwardContext pass = context_of(64, 2);
  const at::Tensor y = narrow.forward(x, LayerContext{pass, {}}, false).output,
                   expected = wide.forward(x.to(at::kDouble), LayerContext{pass, {}}, false).output;
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LT((y.to(at::kDouble) - expected).norm().item<double>(),
            0.02 * expected.norm().item<double>());
  y.backward(at::ones_like(y));
  expected.backward(at::ones_like(expected));
  std::map<std::string, at::Tensor> grads;
  wide.visit([&](const std::string& name, Parameter& p) { grads[name] = wide_store.grad(p); });
  narrow.visit([&](const std::string& name, Parameter& p) {
    const at::Tensor grad = narrow_store.grad(p).to(at::kDouble);
    EXPECT_LT((grad - grads[name]).norm().item<double>(), 0.03 * grads[name].norm().item<double>())
        << name;
  });
}

TEST(MambaMixer, RefusesSizesThatDoNotDivide) {
  const auto error = [](int64_t heads, int64_t groups, int64_t t) {
    Violations violations;
    const TransformerConfig config = mixer_config(heads, groups);
    kMambaLetter.validate(config, violations);
    kMambaLetter.validate_ranks(config, t, violations);
    return violations.empty() ? "" : violations.messages().front();
  };
  EXPECT_EQ(error(6, 3, 3), "");
  EXPECT_THAT(error(6, 3, 2), testing::HasSubstr("neither divides the other"));
  EXPECT_THAT(error(15, 3, 5), testing::HasSubstr("neither divides the other"));
  EXPECT_THAT(error(6, 4, 1), testing::HasSubstr("not divisible by --mamba-num-groups 4"));
  EXPECT_THAT(error(6, 2, 4),
              testing::HasSubstr("not divisible by --tensor-model-parallel-size 4"));
  EXPECT_THAT(error(48, 1, 16), testing::HasSubstr("--mamba-state-dim 8 is not divisible"));
  TransformerConfig none = mixer_config(6, 3);
  none.layer_pattern.clear();
  Violations violations;
  none.mamba_norm_epsilon = 1e-6;
  kMambaLetter.validate(none, violations);
  EXPECT_THAT(violations.messages(),
              testing::Contains("--mamba-norm-epsilon has no effect without layers of the letter "
                                "M, Mamba-2\nhint: leave it out, or give --hybrid-layer-pattern "
                                "with M"));
}

TEST(MambaMixer, LimitsOfTimeSteps) {
  const auto parsed = [](const std::vector<std::string>& given, double least, double most) {
    MambaConfig config;
    config.mamba_dt_limit = given;
    Violations violations;
    config.validate(violations, ShapeConfig());
    EXPECT_TRUE(violations.empty());
    EXPECT_EQ(config.time_step_limits().least, least);
    EXPECT_EQ(config.time_step_limits().most, most);
  };
  parsed({}, 0.0, std::numeric_limits<double>::infinity());
  parsed({"0.001", "inf"}, 0.001, std::numeric_limits<double>::infinity());
  parsed({"1e-3", "0.5"}, 0.001, 0.5);
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"0.1"}, {"0.2", "0.1"}, {"-1", "1"}, {"0", "x"}, {"0", "nan"}}) {
    MambaConfig config;
    config.mamba_dt_limit = wrong;
    Violations violations;
    config.validate(violations, ShapeConfig());
    EXPECT_EQ(violations.messages().size(), 1u) << wrong.back();
  }
}

}  // namespace
}  // namespace megatron
