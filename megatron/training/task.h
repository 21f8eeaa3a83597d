// A training task: how model and datasets are built, and what one forward computes. Interface
// between the training loop and the models.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/dataset_builder.h"
#include "megatron/models/model.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/training/batch.h"

namespace megatron {

class Shrinker;
struct StartPoint;  // training/setup.h

// Output of one segment of the model for a micro-batch: the tensors for the next segment, or the
// loss on the last one.
struct StageOutput {
  StageTensors activation;
  Loss loss;
  // [PretrainTask::metrics.size()] fp64, sums with the weight of the loss; undefined: none
  at::Tensor metrics;
};

struct PretrainTask {
  std::string name;
  ModelProvider model_provider;
  std::function<TrainValidTestDatasets(const Arguments&, const DatasetRequest&)> datasets_provider;
  // `input` is what the segment before gave, empty on the first. A loss is a pair (sum over tokens,
  // weight).
  std::function<StageOutput(Model&, const Batch&, const StageTensors& input, const ForwardContext&)>
      forward_step;
  // With the vocabulary split over the stages (the last segment then outputs an activation, too):
  // this stage's part of the loss of a micro-batch.
  std::function<std::unique_ptr<VocabularyPass>(Model&, const Batch&, const at::Tensor& hidden)>
      begin_loss;
  // With a reference model, the passes of a step go through it first, forward alone: the model as
  // it was when training began, which it is again with its adapters off. `reference_step` is
  // forward_step for it; what the last segment returns as loss.sum becomes Batch::reference.
  std::function<StageOutput(Model&, const Batch&, const StageTensors& input, const ForwardContext&)>
      reference_step;
  // Auxiliary losses of the model that a step divides by a weight of their own, not by that of the
  // main loss. The weights follow from the data: those of all micro-batches and ranks are summed
  // before the first backward. [] fp64: what this rank's part of a micro-batch weighs
  using WeightOfBatch = std::function<at::Tensor(const Batch&)>;
  std::vector<std::pair<std::string, WeightOfBatch>> own_weights;
  WeightOfBatch loss_weight;          // of the main loss; needed with own_weights
  std::string loss_name = "lm loss";  // in logs
  bool loss_per_token = true;         // the weight of the loss is a number of tokens
  // What each sequence of a micro-batch adds to that weight, [b] fp64, from the sums of their loss
  // masks; null: those sums. For losses that count all tokens (token_weights.h)
  std::function<at::Tensor(const at::Tensor& mask_sums)> sequence_weights;
  // Parts of the model whose gradient norms are logged: names and prefixes of their parameters; the
  // last one has all others. Empty: the norm of all is logged alone
  std::vector<std::pair<std::string, std::vector<std::string>>> norm_parts;
  bool logs_images = false, logs_sounds = false;  // what micro-batches have of them
  // Names of StageOutput::metrics; logged divided by the weight
  std::vector<std::string> metrics;
  // What adds to batches of a model of this configuration; null: columns are all that it reads
  std::function<BatchMaker::Addition(const ModelConfig&)> add_to_batch;
  BatchMaker::Addition addition(const ModelConfig& model) const {
    return add_to_batch ? add_to_batch(model) : nullptr;
  }
  // Work of a chunk on micro-batches before their turn: so many of a step are read before the one
  // that the chunk computes, and each is prepared as it is read. 0: none. Null: no chunk has any
  struct Ahead {
    int microbatches = 0;
    std::function<void(Batch&, bool training)> prepare = {};
  };
  std::function<Ahead(Model&)> ahead;
  // Of models of several pretrained parts: joins what a new run names of them, and changes nothing
  // where it names one whole checkpoint. Throws Error for parts that do not fit. Null: models have
  // no such parts
  std::function<void(const Arguments&, const Vocabulary&, StartPoint& start)> join_parts;
  // Floating-point operations of training with one token (reporting/flops.h)
  std::function<double(const Arguments&, const Vocabulary&)> flops_per_token;
};

// A row of the table of tasks, tasks/tasks.h.
struct TaskType {
  std::string_view name;  // as --task spells it
  PretrainTask (*make)(const Arguments&);
  OwnConfig config = {};  // flags of its own, with their defaults; one of Arguments::own
  // Of runs with this task; null: nothing more. Derives values from flags before all others are
  // derived, idempotent; adds the rules that the task breaks; keeps in a tiny model what matters to
  // it, after the sizes of layers and their number have been shrunk.
  void (*finalize)(Arguments& arguments) = nullptr;
  void (*validate)(const Arguments& arguments, Violations& violations) = nullptr;
  void (*shrink)(Arguments& arguments, const Arguments& before, Shrinker& shrinker) = nullptr;
};

}  // namespace megatron
