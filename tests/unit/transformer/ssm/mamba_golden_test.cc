// Mamba-2 against the mixers of Hugging Face transformers: outputs and every gradient
// (tests/golden/mamba/make_goldens.py), and the same outputs by decoding.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "megatron/nn/parameter_store.h"
#include "megatron/transformer/ssm/mamba_mixer.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ragged_steps.h"
#include "tests/unit/transformer/ssm/mixer_config.h"

namespace megatron {
namespace {

struct MambaGolden {
  MambaGolden(const std::string& name, int64_t groups)
      : config(mixer_config(6, groups)),
        tensors(read_golden_tensors(
            SafetensorsFile(MEGATRON_SOURCE_DIR "/tests/golden/mamba/" + name + ".safetensors"))) {
    config.hidden_size = 12;
    config.seq_length = 29;
    config.mamba_head_dim = 4;
    config.mamba_state_dim = 5;
    if (name == "mamba2") config.mamba_dt_limit = {"0.3", "0.9"};
    config.norm_placement = NormPlacement::kPost;  // the layer's norm is not part of the golden
  }
  // [b, s, h] there, [s, b, h] here
  at::Tensor activation(const std::string& name, at::ScalarType type) const {
    return tensors.at(name).transpose(0, 1).contiguous().to(type);
  }
  void set_values(MambaMixer& mixer) const {
    mixer.visit([&](const std::string& name, Parameter& parameter) {
      parameter.value.copy_(tensors.at(name));
    });
  }
  TransformerConfig config;
  std::map<std::string, at::Tensor> tensors;
};

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>() /
         b.to(at::kDouble).norm().item<double>();
}

void compare_mixer(const std::string& name, int64_t groups) {
  SCOPED_TRACE(name);
  const MambaGolden golden(name, groups);
  const ParallelGroups one;
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    MambaMixer mixer(golden.config, 1, false, one);
    PlainParameterStore store(mixer, type, at::kCPU, true);
    golden.set_values(mixer);
    const at::Tensor x = golden.activation("x", type).set_requires_grad(true);
    const ForwardContext pass = context_of(29, 2);
    const at::Tensor y = mixer.forward(x, LayerContext{pass, {}}, /*add=*/false).output;
    EXPECT_LT(relative_distance(y.detach(), golden.activation("y", type)), 1e-5);
    y.backward(golden.activation("dy", type));
    EXPECT_LT(relative_distance(x.grad(), golden.activation("dx", type)), 1e-5);
    mixer.visit([&](const std::string& parameter, Parameter& p) {
      EXPECT_LT(relative_distance(store.grad(p), golden.tensors.at("grad/" + parameter)), 1e-5)
          << parameter;
    });
  }
}

TEST(MambaGoldens, MixerOfMamba2) { compare_mixer("mamba2", 1); }
TEST(MambaGoldens, MixerOfNemotronH) { compare_mixer("nemotron_h", 2); }

// Prompts of 11 and 3 tokens, then single ones.
TEST(MambaGoldens, Decoding) {
  const MambaGolden golden("mamba2", 1);
  const ParallelGroups one;
  const at::NoGradGuard no_grad;
  MambaMixer mixer(golden.config, 1, false, one);
  PlainParameterStore store(mixer, at::kFloat, at::kCPU, false);
  golden.set_values(mixer);
  const at::Tensor x = golden.activation("x", at::kFloat), y = golden.activation("y", at::kFloat);
  RecurrentState state;
  RaggedSteps steps(2, 29, 4);
  for (int64_t step = 0; step < 19; ++step) {
    const int64_t first[] = {step == 0 ? 0 : 10 + step, step == 0 ? 0 : 2 + step};
    std::vector<StepPart> parts;
    std::vector<at::Tensor> in, expected;
    for (const int64_t sequence : {0, 1}) {
      const int64_t count = step > 0 ? 1 : sequence == 0 ? 11 : 3;
      parts.push_back({sequence, first[sequence], count});
      in.push_back(x.narrow(1, sequence, 1).narrow(0, first[sequence], count));
      expected.push_back(y.narrow(1, sequence, 1).narrow(0, first[sequence], count));
    }
    const RaggedBatch batch = steps.batch(parts);
    const DecodingPass decoding{steps.state, batch};
    const ForwardContext pass = RaggedSteps::context_of(decoding);
    const at::Tensor out =
        mixer.forward(at::cat(in), LayerContext{pass, {}, false, &state}, false).output;
    EXPECT_LT(relative_distance(out, at::cat(expected)), 1e-5) << step;
  }
}

}  // namespace
}  // namespace megatron
