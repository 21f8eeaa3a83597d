// The flags of commands that serve a model from this process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/base/parse.h"
#include "megatron/base/value_checks.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/model_service.h"
#include "tools/support/load_model_flags.h"

namespace megatron {

struct ServedModelConfig : LoadModelConfig {
  std::vector<std::string> adapters;  // NAME=DIR
  std::string chat_template;
  std::string media_model, audio_media_model;
  bool required = true;  // whether --load must be given

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// The ranks of a served model.
struct ServedRanksConfig : Config {
  int64_t tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1;

  void fields(FieldVisitor& v) override {
    v.group("ranks");
    v.field("tensor_model_parallel_size", tensor_model_parallel_size,
            "ranks that share the layers; a launcher such as torchrun starts them");
    v.field("pipeline_model_parallel_size", pipeline_model_parallel_size,
            "stages that the layers are divided over");
  }
  void validate(Violations& violations) const override {
    at_least(violations, "--tensor-model-parallel-size", tensor_model_parallel_size, 1);
    at_least(violations, "--pipeline-model-parallel-size", pipeline_model_parallel_size, 1);
  }
  int64_t ranks() const { return tensor_model_parallel_size * pipeline_model_parallel_size; }
};

// Megatron-LM's flags for inference that are no fields here: accepted because it is so, or refused
// with the reason. `ranks`: the command has fields for the ranks of a model.
std::span<const KnownFlag> known_inference_flags(bool ranks = false);

// Adds a violation unless exactly one of --url, a server, and --load, a model, is given.
void require_url_or_load(const std::string& url, const ServedModelConfig& config,
                         Violations& violations);

// Loads this rank's part of the model. `groups` must outlive the result.
std::unique_ptr<ServedRank> load_served_rank(const ServedModelConfig& config,
                                             const EngineConfig& engine,
                                             const ParallelGroups& groups, int local_rank = 0,
                                             int local_ranks = 1, Agreement* agreement = nullptr);

// On rank 0; `links`: to the others, null: there are none.
std::unique_ptr<ModelService> make_model_service(std::unique_ptr<ServedRank> rank,
                                                 std::unique_ptr<FollowerLinks> links,
                                                 const ServedModelConfig& config,
                                                 const EngineConfig& engine,
                                                 const ServeConfig& serve,
                                                 const ServeLimits& limits);

// Both, on this process alone: more ranks are refused.
std::unique_ptr<ModelService> load_served_model(const ServedModelConfig& config,
                                                const EngineConfig& engine,
                                                const ParallelGroups& groups);

}  // namespace megatron
