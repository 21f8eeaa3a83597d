// A training task: how model and datasets are built, and what one forward computes. Interface
// between the training loop and the models.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/models/model.h"
#include "megatron/nn/module.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/reporting/flops.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/batch.h"

namespace megatron {

// Vocabulary sizes, determined by the tokenizer.
struct Vocabulary {
  int64_t size = 0;
  int64_t padded_size = 0;
};

// Output of one segment of the model for a micro-batch: the activation for the next segment, or the
// loss on the last one.
struct StageOutput {
  at::Tensor activation;
  Loss loss;
  // [PretrainTask::metrics.size()] fp64, sums with the weight of the loss; undefined: none
  at::Tensor metrics;
};

struct PretrainTask {
  std::string name;
  // Builds one segment and declares its parameters; `groups` outlives the model. `chunks`: those
  // that this rank has built already.
  std::function<std::unique_ptr<Module>(const Arguments&, const Vocabulary&, const ParallelGroups&,
                                        const StageSlice&, const std::vector<Module*>& chunks)>
      model_provider;
  std::function<TrainValidTestDatasets(const Arguments&, const DatasetRequest&)> datasets_provider;
  // `input`: activation of the previous segment, undefined on the first. A loss is a pair (sum over
  // tokens, weight).
  std::function<StageOutput(Module&, const Batch&, const at::Tensor& input, const ForwardContext&)>
      forward_step;
  // With the vocabulary split over the stages (the last segment then outputs an activation, too):
  // this stage's part of the loss of a micro-batch.
  std::function<std::unique_ptr<VocabularyPass>(Model&, const Batch&, const at::Tensor& hidden)>
      begin_loss;
  // With a reference model (the model before training; with adapters, the same model with adapters
  // disabled), the micro-batches of a step are first run forward through it. `reference_step` is
  // its forward_step; loss.sum of the last segment becomes Batch::reference.
  std::function<StageOutput(Module&, const Batch&, const at::Tensor& input, const ForwardContext&)>
      reference_step;
  std::string loss_name = "lm loss";  // in logs
  bool loss_per_token = true;         // the weight of the loss is a number of tokens
  // Names of StageOutput::metrics; logged divided by the weight
  std::vector<std::string> metrics;
  // For FLOP counts.
  std::function<ModelFlops(const Arguments&, const Vocabulary&)> model_flops;
};

}  // namespace megatron
