// The goldens of tests/golden/hf: outputs of Hugging Face models computed by transformers, and
// comparisons with them on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"

namespace megatron {

// ||actual - expected|| over ||expected|| of each row of logits and of each gradient, in fp32.
inline constexpr double kHfTolerance = 1e-4;

// One model of each family, and more for families with several variants.
inline const char* const kHfGoldens[] = {"llama2",
                                         "llama3",
                                         "mistral",
                                         "qwen2",
                                         "qwen3",
                                         "gpt2",
                                         "gpt_neox",
                                         "gpt_neox_sequential",
                                         "phi3",
                                         "gemma2",
                                         "gemma3",
                                         "olmo2",
                                         "starcoder2",
                                         "mixtral",
                                         "qwen2_moe",
                                         "qwen3_moe",
                                         "olmoe",
                                         "deepseek_v2",
                                         "deepseek_v2_lite",
                                         "deepseek_v3",
                                         "glm4_moe",
                                         "gpt_oss",
                                         "mamba2",
                                         "nemotron_h",
                                         "bamba",
                                         "granitemoehybrid",
                                         "granitemoehybrid_rope",
                                         "qwen3_5_text"};

// Those with layers that carry states, whose goldens have two sequences.
inline const char* const kHfStateGoldens[] = {
    "mamba2", "nemotron_h", "bamba", "granitemoehybrid", "granitemoehybrid_rope", "qwen3_5_text"};

// In the source tree, or under the current folder if the program was copied elsewhere.
std::string hf_golden_folder(const std::string& name);

struct HfGolden {
  std::map<std::string, at::Tensor> tensors;

  explicit HfGolden(const std::string& name);
  // The gradient of one tensor, fp64, by its name in transformers.
  at::Tensor grad(const std::string& name, at::IntArrayRef shape) const;
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
  std::vector<int32_t> ids(int64_t count) const;
  at::Tensor tokens(int64_t count) const;  // [1, count]
  int64_t length() const;
  // Of models with states: [2, length]
  at::Tensor both() const;
  // What gradients are of, [b, s].
  at::Tensor gradient_tokens() const;
};

// A request to load the model in fp32.
LoadModelRequest hf_request(const std::string& name, at::Device device = at::kCPU);

// Fills the parameters of a slice of the folder's model, whatever type its files have.
void load_hf_values(const HfFolder& folder, const ParallelGroups& groups, const StageSlice& slice,
                    Model& model);

// Checks the logits of both sequences. `forward` returns [s, v] on the CPU for tokens [1, s].
void expect_hf_logits(const HfGolden& golden,
                      const std::function<at::Tensor(const at::Tensor& tokens)>& forward,
                      const std::string& what);

// Checks the logits [s, 2, v] of both(), of which there may be more than tokens.
void expect_hf_logits_of_both(const HfGolden& golden, const at::Tensor& logits,
                              const std::string& what);

// Checks logits, greedy tokens and gradients of the model on one device.
void expect_hf_logits_on(const std::string& name, at::Device device);
void expect_hf_greedy_tokens_on(const std::string& name, at::Device device);
// Checks the greedy tokens of an engine on these ranks, as threads, with the prompt in chunks.
void expect_hf_greedy_tokens_over(const std::string& name, int tensor, int stages);
void expect_hf_gradients_on(const std::string& name, at::Device device);

}  // namespace megatron
