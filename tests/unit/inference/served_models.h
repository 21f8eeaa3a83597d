// Small models as they are served, sequences for them, and what each sequence gets alone.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "megatron/inference/model_runner.h"
#include "megatron/interop/load_model.h"
#include "tests/unit/inference/plan_driver.h"

namespace megatron {

constexpr int64_t kToyVocab = 61;

// Two layers with grouped queries, rotary positions and a gated MLP.
ModelConfig small_served_model();

// The same with latent attention.
ModelConfig latent_served_model();

// Layers of a pattern, with Mamba-2 layers of 4 heads in 2 groups and gated delta nets of 2 heads
// of keys and 4 of values.
ModelConfig hybrid_served_model(const std::string& pattern);

// A model, or a stage of one, with random weights.
struct Served {
  explicit Served(std::unique_ptr<Model> made, WeightReader read = {},
                  at::ScalarType type = at::kDouble, at::Device device = at::kCPU);
  static std::unique_ptr<Model> make(ModelConfig config, const ParallelGroups& groups);

  std::unique_ptr<Model> model;
  ForwardParameterStore store;
  std::optional<ServedWeights> weights;
};

// A model of tests/golden/hf in fp64, with an adapter or without; an adapter of tests/golden/lora;
// a copy of one with a larger lora_alpha.
LoadModelRequest golden_model(const std::string& base, const std::filesystem::path& adapter = {});
std::filesystem::path golden_adapter(const std::string& name);
std::filesystem::path stronger_than(const std::filesystem::path& adapter);

// Four slots and blocks of four positions; tensor ranks divide the rows of steps with enough.
RunnerOptions small_runner(int32_t blocks);

std::vector<int32_t> random_ids(std::mt19937& random, int64_t count);
// Greedy ones and drawn ones, with every option of sampling and of log-probabilities. Every third
// one has the prompt of the one before it.
std::vector<DrivenSequence> random_sequences(std::mt19937& random, size_t count,
                                             int64_t longest_prompt = 17, int64_t most_tokens = 9);

// What sequences get by forwards over everything known, without a cache.
using LogitsOf = std::function<at::Tensor(const std::vector<int32_t>& ids)>;
DrivenSequence alone(const DrivenSequence& given, const LogitsOf& logits_of,
                     int64_t vocab_size = kToyVocab);
std::vector<DrivenSequence> all_alone(Model& model, const std::vector<DrivenSequence>& given);

std::vector<int32_t> ids_of(const DrivenSequence& sequence);
void expect_equal(const std::vector<DrivenSequence>& got, const std::vector<DrivenSequence>& want,
                  const std::string& where);

}  // namespace megatron
