// One rank's part of a model that is served: weights, adapters, cache and runner.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/inference/adapters.h"
#include "megatron/inference/engine_config.h"
#include "megatron/inference/model_runner.h"
#include "megatron/inference/served_weights.h"
#include "megatron/interop/load_model.h"

namespace megatron {

using AdapterFolders = std::vector<std::pair<std::string, std::filesystem::path>>;  // name, PEFT

class ServedRank {
 public:
  // `request`: by which `loaded` was loaded; other weights are read in the same way. `local_ranks`:
  // ranks that share the memory of this machine. Allocates the cache, on every rank of the model as
  // many blocks. Throws Error: the model cannot be decoded, the cache holds nothing, adapters are
  // wrong.
  //
  // Communication: over the ranks of the model, which make their parts at the same time.
  ServedRank(LoadModelRequest request, LoadedModel loaded, const EngineConfig& config,
             const AdapterFolders& adapters, int local_ranks = 1);

  const LoadModelRequest& request() const { return request_; }
  const LoadedModel& loaded() const { return loaded_; }
  ModelRunner& runner() { return *runner_; }

 private:
  std::vector<at::Tensor> read_other_weights(const std::string& source);
  std::unique_ptr<ModelRunner> make_runner(const EngineConfig& config, int local_ranks);

  const LoadModelRequest request_;
  LoadedModel loaded_;
  AdapterList adapters_;
  ServedWeights weights_;
  std::unique_ptr<ModelRunner> runner_;
};

}  // namespace megatron
