// What a run needs before its first step, built in the order in which things depend on each other.
#pragma once

#include <memory>
#include <optional>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/training/run_state.h"
#include "megatron/training/train_step.h"

namespace megatron {

// Where a run starts.
struct Start {
  std::optional<Checkpoint> checkpoint;
  RunState stored;            // of the checkpoint
  bool weights_only = false;  // --finetune, --pretrained-checkpoint: iterations and samples start anew
  bool continues() const { return checkpoint && !weights_only; }
};

// Decides by --start, --load, --pretrained-checkpoint; logs what was passed over. Throws Error.
Start decide_start(const TrainingConfig& config);

// Builds the datasets in the order that the checkpoint was trained in. `state` gets the description of the order. Throws Error
// when the order is another one than the checkpoint's, naming what differs.
TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments, const Tokenizer& tokenizer,
                                      const Start& start, RunState& state);

// Element type of the model.
at::ScalarType model_dtype(const OptimizerConfig& config);

// Model, store, initial weights, optimizer; then the checkpoint's content.
TrainedModel build_model(const PretrainTask& task, const Arguments& arguments, const Vocabulary& vocabulary,
                         const ParallelGroups& groups, c10::Device device, const Start& start);

}  // namespace megatron
