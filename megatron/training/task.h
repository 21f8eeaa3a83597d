// What differs between the models that the loop can train: how model and datasets are made, and what a forward pass is.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/module.h"
#include "megatron/training/arguments.h"
#include "megatron/training/batch.h"
#include "megatron/training/flops.h"

namespace megatron {

// Sizes of the vocabulary, which the tokenizer decides.
struct Vocabulary {
  int64_t size = 0;
  int64_t padded_size = 0;
};

struct PretrainTask {
  std::string name;
  // Declares the parameters; `groups` outlives the model.
  std::function<std::unique_ptr<Module>(const Arguments&, const Vocabulary&, const ParallelGroups&)> model_provider;
  std::function<TrainValidTestDatasets(const Arguments&, const DatasetRequest&)> datasets_provider;
  // The loss of one micro-batch as a pair (sum over tokens, weight).
  std::function<Loss(Module&, const Batch&, const ForwardContext&)> forward_step;
  // For FLOP counts.
  std::function<ModelFlops(const Arguments&, const Vocabulary&)> model_flops;
};

}  // namespace megatron
