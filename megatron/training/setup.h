// Builds what a run needs before its first step, in order of dependence.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/image_plan.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/runtime/job.h"
#include "megatron/training/run_state.h"
#include "megatron/training/train_step.h"

namespace megatron {

// What a run starts from.
struct StartPoint {
  std::optional<Checkpoint> checkpoint;
  RunState stored;  // state in the checkpoint
  // --finetune, --pretrained-checkpoint, or a checkpoint with weights only: iterations and samples
  // count from 0.
  bool weights_only = false;
  std::vector<std::string> waived;  // tensors of a Hugging Face folder without weights
  bool upcycles = false;            // --moe-use-upcycling: the checkpoint is of a dense model
  // A model with media of pretrained parts (interop/model_parts.h): the checkpoint is the language
  // model's part, and these are the others
  std::optional<std::vector<Checkpoint>> encoders;
  std::vector<std::string> random;  // patterns of its parameters that begin at random
  std::vector<std::string> notes;   // of its parts, for the log
  bool continues() const { return checkpoint && !weights_only; }
  // The imported model that checkpoints of this run are of, too; null: there is none.
  const Checkpoint* origin() const { return checkpoint && !encoders ? &*checkpoint : nullptr; }
};

// Decides by --start-mode, --load and --pretrained-checkpoint (folders of checkpoints or Hugging
// Face folders); logs checkpoints that were skipped. The ranks verify the checkpoint together, each
// a share of its bytes, and all start from the same one. Throws Error on every rank. Collective.
StartPoint decide_start(const TrainingConfig& config, const Job& job);

// The datasets for the training samples and evaluations of the arguments, ignoring any checkpoint.
TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer);

// Builds the datasets with the data order of the checkpoint. `state` gets the description of the
// order. Throws Error if the order differs from the checkpoint's, naming what differs.
TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer, const StartPoint& start,
                                      RunState& state);

// use_threads (tensor/threads.h) by --num-threads. With --optimizer-cpu-offload a rank takes its
// share of the cores whatever OMP_NUM_THREADS says: they update weights.
void use_threads(const Arguments& arguments, int local_ranks);

// Element type of the model by the flags.
at::ScalarType model_dtype(const OptimizerConfig& config);

// Vocabulary sizes with this tokenizer, padded for the ranks that the vocabulary is split over.
Vocabulary vocabulary_of(const Arguments& arguments, const Tokenizer& tokenizer);

// Builds model chunks, stores, pipeline, initial weights and optimizer; then loads the checkpoint.
TrainedModel build_model(const PretrainTask& task, const Arguments& arguments,
                         const Vocabulary& vocabulary, const ParallelGroups& groups,
                         at::ScalarType dtype, c10::Device device, const StartPoint& start,
                         Agreement* agreement = nullptr);

// The training samples of this rank from `consumed_samples` on; those of all ranks with
// --hybrid-context-parallel, and on encoders' ranks of their own.
std::unique_ptr<DataLoader> make_train_loader(const Arguments& arguments,
                                              const ParallelGroups& groups,
                                              const std::shared_ptr<const Dataset>& dataset,
                                              int64_t consumed_samples, c10::Device device);

// This rank's among the data-parallel ranks of the language model; 0 on encoders' ranks of their
// own, which read the samples of all of them.
int64_t data_parallel_rank(const Arguments& arguments, const ParallelGroups& groups);

// The tensor and context ranks of the stage that encodes images divide them; others read none.
// Where encoders have ranks of their own, the data-parallel ones of these do.
ImageRanks image_ranks(const Arguments& arguments, const ParallelGroups& groups);

// Of the encoders of the arguments; frozen ones have no backward.
MediaCosts media_costs(const Arguments& arguments);

// Options of the iteration that follows `consumed_samples`.
StepOptions step_options(const Arguments& arguments, int64_t consumed_samples);

}  // namespace megatron
