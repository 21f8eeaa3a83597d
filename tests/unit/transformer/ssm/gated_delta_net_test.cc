// The gated delta net: Qwen 3.5's layer in transformers; tensor, sequence and context parallelism
// against one rank; packed documents; decoding in slices; recomputation; what its sizes refuse.
#include "megatron/transformer/ssm/gated_delta_net.h"

#include <gmock/gmock.h>

#include <map>
#include <string>

#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/ssm/normed_gate.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/transformer/ssm/mixer_cases.h"

namespace megatron {
namespace {

TransformerConfig delta_config(int64_t key_heads, int64_t value_heads) {
  TransformerConfig config;
  config.num_layers = 1;
  config.layer_pattern = "G";
  config.hidden_size = 8;
  config.num_attention_heads = 1;
  config.seq_length = 16;
  config.linear_num_key_heads = key_heads;
  config.linear_num_value_heads = value_heads;
  config.linear_key_head_dim = 4;
  config.linear_value_head_dim = 6;
  config.normalization = Normalization::kRMSNorm;
  config.layernorm_epsilon = 1e-6;
  config.init_method_std = 0.4;
  config.hidden_dropout = 0.0;
  config.finalize();
  return config;
}

MixerRun drawn_delta(int64_t key_heads, int64_t value_heads, int64_t s = 16) {
  return {delta_config(key_heads, value_heads), draw({s, 2, 8}, 1), draw({s, 2, 8}, 2), {}};
}

TEST(GatedDeltaNet, EqualsTransformers) {
  const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/gated_delta/qwen3_5.safetensors");
  const std::map<std::string, at::Tensor> golden = read_golden_tensors(file);
  MixerRun what{delta_config(2, 4), u(30, {150, 2, 8}), u(40, {150, 2, 8}), {}};
  what.config.norm_placement = NormPlacement::kPost;  // no norm of the input
  const MixerPass pass = run_mixer<GatedDeltaNet>(
      what, ParallelGroups(), false, [](const std::string& name, Parameter& parameter) {
        const auto set = [&](const at::Tensor& value) {
          parameter.value.copy_(value.view(parameter.local_shape));
        };
        if (name == "in_proj.weight") set(0.5 * u(21, {72, 8}));
        if (name == "conv1d.weight") set(0.5 * u(22, {40, 4}));
        if (name == "dt_bias") set(u(24, {4}));
        if (name == "A_log") set(0.5 + 0.5 * u(25, {4}));
        if (name == "out_norm.weight") set(1 + 0.1 * u(27, {6}));
        if (name == "out_proj.weight") set(0.5 * u(28, {8, 24}));
      });
  EXPECT_LT(largest(pass.y - golden.at("y")), 1e-11);
  EXPECT_LT(largest(pass.dx - golden.at("dx")), 1e-11);
  ASSERT_EQ(pass.grads.size() + 2, golden.size());
  for (const auto& [name, grad] : pass.grads)
    EXPECT_LT(largest(grad - golden.at(name).view(grad.sizes())), 1e-9) << name;
}

// Element i is sin(1.3 c + 0.7 i^2), rounded to fp32: matrices of full rank.
at::Tensor w(int64_t c, at::IntArrayRef shape) {
  const at::Tensor i = at::arange(c10::multiply_integers(shape), at::kDouble);
  return at::sin(1.3 * static_cast<double>(c) + 0.7 * i * i).to(at::kFloat).view(shape);
}

// In fp32 output and gradients are as far from fp64 as those of transformers. The norm divides by
// outputs that are often near 0, which multiplies in the backward whatever was rounded before: with
// a large epsilon gradients are nearer (6 in place of 26 units of 2^-24; transformers 27).
TEST(GatedDeltaNet, RoundsAsTransformersDoes) {
  const at::Tensor theirs =
      read_golden_tensors(SafetensorsFile(MEGATRON_SOURCE_DIR
                                          "/tests/golden/gated_delta/qwen3_5_rounding.safetensors"))
          .at("errors");
  TransformerConfig config = delta_config(4, 8);
  config.hidden_size = 48;
  config.linear_key_head_dim = 6;
  config.linear_value_head_dim = 4;
  config.norm_placement = NormPlacement::kPost;
  const auto errors = [&](int64_t c, double epsilon) {
    config.layernorm_epsilon = epsilon;
    const auto run = [&](at::ScalarType dtype) {
      const MixerRun what{config, w(c + 30, {24, 2, 48}), w(c + 40, {24, 2, 48}), {}, dtype};
      return run_mixer<GatedDeltaNet>(what, ParallelGroups(), false,
                                      [c](const std::string& name, Parameter& parameter) {
                                        const at::IntArrayRef shape = parameter.local_shape;
                                        if (name == "in_proj.weight")
                                          parameter.value.copy_(0.25 * w(c + 21, shape));
                                        if (name == "conv1d.weight")
                                          parameter.value.copy_(0.5 * w(c + 22, shape));
                                        if (name == "A_log")
                                          parameter.value.copy_(1.5 + 1.25 * w(c + 25, shape));
                                        if (name == "out_proj.weight")
                                          parameter.value.copy_(0.25 * w(c + 28, shape));
                                        if (name == "dt_bias" || name == "out_norm.weight")
                                          parameter.value.fill_(1);
                                      });
    };
    const MixerPass exact = run(at::kDouble), rounded = run(at::kFloat);
    std::vector<at::Tensor> difference = {rounded.dx - exact.dx}, whole = {exact.dx};
    for (const auto& [name, grad] : exact.grads) {
      difference.push_back(rounded.grads.at(name) - grad);
      whole.push_back(grad);
    }
    const auto norm = [](const std::vector<at::Tensor>& tensors) {
      double squares = 0;
      for (const at::Tensor& t : tensors) squares += t.square().sum().item<double>();
      return std::sqrt(squares);
    };
    return at::tensor(
        {norm({rounded.y - exact.y}) / norm({exact.y}), norm(difference) / norm(whole)},
        at::kDouble);
  };
  std::vector<at::Tensor> ours, calm;
  for (int64_t i = 0; i < theirs.size(0); ++i) {
    ours.push_back(errors(100 * i, 1e-5));
    calm.push_back(errors(100 * i, 0.1));
  }
  const auto mean = [](const at::Tensor& of_cases) { return of_cases.log().mean(0).exp(); };
  const at::Tensor a = mean(at::stack(ours)), b = mean(theirs), c = mean(at::stack(calm));
  EXPECT_TRUE(a.lt(1.1 * b).all().item<bool>()) << a << b;
  EXPECT_LT(c[1].item<double>(), 0.3 * a[1].item<double>());
}

// The published vector of a norm before its gate.
TEST(GatedDeltaNet, NormAndGate) {
  const at::Tensor y = u(14, {2, 4}).view({2, 1, 1, 4}), z = u(15, {2, 4}).view({2, 1, 1, 4}),
                   w = 1 + 0.1 * u(16, {4}), grad = u(19, {2, 4}).view({2, 1, 1, 4});
  const NormedGateResult result = normed_gate(y, z, w, 1e-6);
  expect_vector(result.o,
                {-0.383983889525, 0.055491157648, 0.622289153575, 0.307183674867, -0.178829997902,
                 -0.115728006993, 0.158252855759, 0.283136310187},
                "o");
  const NormedGateGrads grads = normed_gate_backward(grad, y, z, w, result.rstd);
  const auto f = [&] { return normed_gate(y, z, w, 1e-6).o; };
  EXPECT_LT(slope_error(y, grads.y, grad, f), 1e-8);
  EXPECT_LT(slope_error(z, grads.z, grad, f), 1e-8);
  EXPECT_LT(slope_error(w, grads.w, grad, f), 1e-8);
}

TEST(GatedDeltaNet, HeadsOverTensorRanks) {
  expect_heads_over_tensor_ranks<GatedDeltaNet>(drawn_delta(4, 8), {2, 4}, "");
}

TEST(GatedDeltaNet, SegmentsOverContextRanks) {
  expect_segments_over_context_ranks<GatedDeltaNet>(drawn_delta(2, 4, 24));
}

TEST(GatedDeltaNet, ShortSegments) { expect_short_segments<GatedDeltaNet>(drawn_delta(2, 2, 8)); }

TEST(GatedDeltaNet, PackedDocumentsAreDocumentsAlone) {
  expect_packed_documents_are_documents_alone<GatedDeltaNet>(drawn_delta(2, 4, 20));
}

TEST(GatedDeltaNet, DecodingInSlicesIsOnePass) {
  expect_slices_are_one_pass<GatedDeltaNet>(drawn_delta(2, 4, 12));
}

// Chunks of 64 rows, two and a part.
TEST(GatedDeltaNet, ReplayedChunksHaveTheBitsOfTheForward) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
    expect_bits_of_the_forward<GatedDeltaNet>(delta_config(2, 4), 150, type);
}

TEST(GatedDeltaNet, KeepsStatesInTheTypesGiven) {
  expect_states_of_types<GatedDeltaNet>(delta_config(2, 4), 40);
}

TEST(GatedDeltaNet, RecomputedNorm) {
  expect_norm_again<GatedDeltaNet>(drawn_delta(2, 4), "gdn_norm_out", ParallelGroups());
}

TEST(GatedDeltaNet, InitialValuesAndTypes) {
  const ParallelGroups one;
  const TransformerConfig config = delta_config(2, 512);
  GatedDeltaNet net(config, 1, false, one);
  PlainParameterStore store(net, at::kBFloat16, at::kCPU, false);
  initialize_parameters(net, 3, one);
  net.visit([&](const std::string& name, Parameter& parameter) {
    const bool fp32 = name == "A_log" || name == "dt_bias";
    EXPECT_EQ(parameter.value.scalar_type(), fp32 ? at::kFloat : at::kBFloat16) << name;
    const at::Tensor value = parameter.value.to(at::kDouble);
    if (name == "conv1d.weight") {
      EXPECT_LE(largest(value), 0.5);
      EXPECT_NEAR(value.square().mean().item<double>(), 0.25 / 3, 0.005);
    }
    if (name == "A_log") {
      EXPECT_GE(value.min().item<double>(), 0.0);
      EXPECT_NEAR(at::exp(value).mean().item<double>(), 8.5, 0.7);
    }
    if (name == "dt_bias" || name == "out_norm.weight") {
      EXPECT_TRUE(value.eq(1.0).all().item<bool>());
    }
  });
}

TEST(GatedDeltaNet, RefusesSizesThatDoNotDivide) {
  const auto error = [](int64_t keys, int64_t values, int64_t t) {
    Violations violations;
    const TransformerConfig config = delta_config(keys, values);
    kGatedDeltaLetter.validate(config, violations);
    kGatedDeltaLetter.validate_ranks(config, t, violations);
    return violations.empty() ? "" : violations.messages().front();
  };
  EXPECT_EQ(error(2, 4, 2), "");
  EXPECT_THAT(error(4, 6, 1), testing::HasSubstr("not divisible by --linear-num-key-heads 4"));
  EXPECT_THAT(error(2, 4, 4),
              testing::HasSubstr("not divisible by --tensor-model-parallel-size 4"));
  TransformerConfig none = delta_config(2, 4);
  none.layer_pattern.clear();
  Violations violations;
  none.linear_value_head_dim = 64;
  kGatedDeltaLetter.validate(none, violations);
  EXPECT_THAT(
      violations.messages(),
      testing::Contains("--linear-value-head-dim has no effect without layers of the letter "
                        "G, gated delta net\nhint: leave it out, or give "
                        "--hybrid-layer-pattern with G"));
}

}  // namespace
}  // namespace megatron
