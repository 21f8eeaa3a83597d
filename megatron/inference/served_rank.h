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
#include "megatron/inference/speculation/served_draft.h"
#include "megatron/interop/load_model.h"

namespace megatron {

using AdapterFolders = std::vector<std::pair<std::string, std::filesystem::path>>;  // name, PEFT

class ServedRank {
 public:
  // `request`: by which `loaded` was loaded; other weights are read in the same way. `local_ranks`:
  // ranks that share the memory of this machine. `draft`: on the first rank; null: none. Allocates
  // the cache, on every rank of the model as many blocks. Throws Error: the model cannot be
  // decoded, the cache holds nothing, adapters are wrong.
  //
  // Communication: over the ranks of the model, which make their parts at the same time.
  ServedRank(LoadModelRequest request, LoadedModel loaded, const EngineConfig& config,
             const AdapterFolders& adapters, int local_ranks = 1,
             std::unique_ptr<LoadedDraft> draft = nullptr);

  const LoadModelRequest& request() const { return request_; }
  const LoadedModel& loaded() const { return loaded_; }
  ServedWeights& weights() { return weights_; }
  StepRunner& runner() { return *served_; }
  // All that ModelRunner::warm_up_some() does piece by piece. Several ranks have done so already.
  void warm_up();
  // A piece of it, while no request waits; false: nothing is left. Captures of tensor ranks meet in
  // an all-reduce and only the first rank knows that nothing waits, so several ranks capture again
  // what a suspension has dropped when a step first needs it.
  bool warm_up_some() { return warms_up_while_idle() && runner_->warm_up_some(); }
  // Null: the draft model is none, or on another rank.
  std::shared_ptr<DraftSource> drafts() const { return draft_ ? draft_->drafts() : nullptr; }

 private:
  bool warms_up_while_idle() const { return loaded_.model->groups().world.size() == 1; }
  std::vector<at::Tensor> read_other_weights(const std::string& source);
  void make_runner(const EngineConfig& config, int local_ranks, std::unique_ptr<LoadedDraft> draft);

  const LoadModelRequest request_;
  LoadedModel loaded_;
  AdapterList adapters_;
  ServedWeights weights_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<ServedDraft> draft_;
  std::optional<DraftedRunner> both_;
  StepRunner* served_ = nullptr;
};

}  // namespace megatron
