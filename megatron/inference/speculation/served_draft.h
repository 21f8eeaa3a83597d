// A draft model on the first rank of a model that is served: weights, cache and drafts.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/config/speculation_config.h"
#include "megatron/inference/model_runner.h"
#include "megatron/inference/served_weights.h"
#include "megatron/inference/speculation/draft_model.h"
#include "megatron/interop/load_model.h"

namespace megatron {

// Throws Error for a model that cannot draft.
void check_draft_model(const std::string& folder, const ModelConfig& model);

// Without a cache yet.
class LoadedDraft {
 public:
  // Loaded from `folder` as `target` says, whole, on this rank alone. Throws Error, before its
  // weights are read, for a model that cannot be a draft model.
  LoadedDraft(const LoadModelRequest& target, const std::string& folder);

  // Throws Error unless each id stands for the same in both.
  void check_vocabulary(const Tokenizer& of_target) const;
  LoadedModel& loaded() { return loaded_; }
  const LoadModelRequest& request() const { return request_; }

 private:
  const ParallelGroups groups_;  // of one rank
  const LoadModelRequest request_;
  LoadedModel loaded_;
};

// By the flags; null: they name none.
std::unique_ptr<LoadedDraft> load_draft(const LoadModelRequest& target,
                                        const SpeculationConfig& config);
// LoadModelRequest::accept of a model for which drafts are made so; `draft`: null: by no model.
// Keeps both.
std::function<void(const ModelConfig&, const Tokenizer*)> accepts_drafts(
    const SpeculationConfig& config, const LoadedDraft* draft);

class ServedDraft {
 public:
  ServedDraft(std::unique_ptr<LoadedDraft> draft, const RunnerOptions& runner,
              const DraftModelOptions& options);

  ModelRunner& runner() { return runner_; }
  const std::shared_ptr<DraftModel>& drafts() const { return drafts_; }

 private:
  const std::unique_ptr<LoadedDraft> draft_;
  ServedWeights weights_;
  ModelRunner runner_;
  const std::shared_ptr<DraftModel> drafts_;
};

}  // namespace megatron
