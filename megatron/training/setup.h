// What a run needs before its first step, built in the order in which things depend on each other.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/runtime/job.h"
#include "megatron/training/run_state.h"
#include "megatron/training/train_step.h"

namespace megatron {

// Where a run starts.
struct StartPoint {
  std::optional<Checkpoint> checkpoint;
  RunState stored;                  // of the checkpoint
  bool weights_only = false;        // --finetune, --pretrained-checkpoint, weights without a run:
                                    // iterations and samples start anew
  std::vector<std::string> waived;  // tensors of a Hugging Face folder that hold no weights
  bool continues() const { return checkpoint && !weights_only; }
};

// Decides by --start-mode, --load, --pretrained-checkpoint, each a folder of checkpoints or of
// Hugging Face; logs what was passed over. The ranks verify what they start from together, each a
// share of its bytes, and start from the same checkpoint. Throws Error, on every rank. Collective.
StartPoint decide_start(const TrainingConfig& config, const Job& job);

// The datasets for the training samples and evaluations that the arguments ask for, without regard
// to a checkpoint.
TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer);

// Builds the datasets in the order that the checkpoint was trained in. `state` gets the description
// of the order. Throws Error when the order is another one than the checkpoint's, naming what
// differs.
TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer, const StartPoint& start,
                                      RunState& state);

// Element type of the model that the flags ask for.
at::ScalarType model_dtype(const OptimizerConfig& config);

// Sizes of the vocabulary of a run with this tokenizer, padded for the ranks that divide it.
Vocabulary vocabulary_of(const Arguments& arguments, const Tokenizer& tokenizer);

// Model chunks, stores, pipeline, initial weights, optimizer; then the checkpoint's content.
TrainedModel build_model(const PretrainTask& task, const Arguments& arguments,
                         const Vocabulary& vocabulary, const ParallelGroups& groups,
                         at::ScalarType dtype, c10::Device device, const StartPoint& start,
                         Agreement* agreement = nullptr);

// The training samples of this rank from `consumed_samples` on; those of all ranks with
// --hybrid-context-parallel.
std::unique_ptr<DataLoader> make_train_loader(const Arguments& arguments,
                                              const ParallelGroups& groups,
                                              const std::shared_ptr<const Dataset>& dataset,
                                              int64_t consumed_samples, c10::Device device);

// What the iteration after `consumed_samples` does.
StepOptions step_options(const Arguments& arguments, int64_t consumed_samples);

}  // namespace megatron
