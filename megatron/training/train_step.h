// One iteration: forward and backward of all micro-batches, gradients reduced over ranks, one
// optimizer step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/optimizer/replica_hashes.h"
#include "megatron/runtime/device.h"
#include "megatron/training/microbatch_graphs.h"
#include "megatron/training/pipeline.h"
#include "megatron/training/task.h"

namespace megatron {

struct RoutingReplay;

// Images and sounds of micro-batches.
struct MediaCounts {
  int64_t images = 0, patches = 0, sounds = 0, frames = 0;
  void add(const MicroBatch& batch);
};

// One segment of the model and the owner of its memory. The store refers to the module and is
// destroyed first.
struct ModelChunk {
  std::unique_ptr<Model> module;
  std::unique_ptr<DistributedDataParallel> store;
};

// What a rank trains: its model chunks (several with virtual pipeline stages), the pipeline, the
// optimizer.
struct TrainedModel {
  std::unique_ptr<ActivationOffload> offload;  // null: activations stay on the device
  std::vector<ModelChunk> chunks;
  std::unique_ptr<Pipeline> pipeline;
  std::shared_ptr<PeerCollectives> ordered_sums;  // over tensor ranks; null: any order will do
  std::unique_ptr<Optimizer> optimizer;           // null with --skip-train
  std::unique_ptr<ReplicaHashes> replicas;        // null: replicas are never compared
  std::unique_ptr<MicrobatchGraphs> graphs;       // null: every micro-batch runs eagerly
  // Frozen reference model, for tasks that have one; empty: the chunks with adapters disabled
  std::vector<ModelChunk> reference;
  const ParallelGroups& groups() const { return chunks.front().store->groups(); }
  at::Device device() const;
  std::vector<DistributedDataParallel*> stores() const;
  int64_t num_parameters() const;                     // elements on this rank
  int64_t num_frozen() const;                         // frozen ones among them
  std::vector<std::string> auxiliary_losses() const;  // names, see Model
  // Whether tensor ranks divide the rows of activations between layers.
  bool divides_rows() const;
};

// Results of an iteration on the device; read later, so that no step waits for the host.
struct StepOutcome {
  at::Tensor loss;            // of run_passes()
  int64_t num_auxiliary = 0;  // losses besides the main one
  at::Tensor state;           // bytes of StepState
  // [3 + 4 d + 3 n] int64, maximum over all ranks: StepOptions::stop; whether replicas of a tensor
  // differ; StepNumbers::count_over_mean, as bits; media of d model replicas; packed times of n
  // ranks from first_reported on.
  at::Tensor report;
  int first_reported = 0;
  int64_t media_replicas = 0;  // d; 0: media are not counted
  at::Tensor squared_norms;    // Optimizer::squared_norms()
  at::Tensor
      tokens_per_expert;  // [names, E] int32, summed over all ranks; undefined: not asked for
};

// A StepOutcome read on the host.
struct StepNumbers {
  double loss = 0;                // per token
  std::vector<double> metrics;    // per token, in the order of the task
  std::vector<double> auxiliary;  // losses of the model, each divided by its own weight
  StepState state;
  int64_t stop = 0;
  bool replicas_differ = false;
  // Of what modules count in a step (Module::step_counts): the tokens of the busiest expert over
  // the mean, in the layer where that is highest; 0: nothing is counted
  double count_over_mean = 0;
  // Of routers_of(); empty: not asked for
  std::vector<std::vector<int64_t>> tokens_per_expert;
  std::vector<MediaCounts> media;    // by model replica; empty: not counted
  std::vector<double> module_norms;  // of the gradient, by Optimizer::keep_norms_of(); empty: none
  // By rank: mean of the steps since the rank's last report, before this one
  std::vector<std::pair<int, SectionTimes>> times;
};

struct StepOptions {
  int64_t num_microbatches = 1;
  int64_t global_batch_size = 1;
  int64_t replicas = 1;        // data-parallel ranks of the language model
  bool per_token_loss = true;  // false: mean of per-micro-batch means
  // Nonzero: this rank requests the end of the run, for this reason; all ranks learn of it with the
  // outcome
  int64_t stop = 0;
  // Choices of routers to record or impose; null: neither
  const RoutingReplay* routing = nullptr;
  // Counted while next_batch() is called, of this model replica, and not by the ranks of encoders
  // of their own; null: not counted
  const MediaCounts* media = nullptr;
  bool keeps_tokens_per_expert = false;  // fills StepOutcome::tokens_per_expert
  // Number of this iteration, if the model has ReplicaHashes
  std::optional<int64_t> compare_replicas;
};

// First half of an iteration: forward and backward of every micro-batch, gradients reduced over
// ranks. `next_batch` returns the micro-batches in order. Returns StepOutcome::loss.
at::Tensor accumulate_gradients(TrainedModel& model, const PretrainTask& task,
                                const StepOptions& options,
                                const std::function<Batch()>& next_batch, Timers& timers);

// Second half: the optimizer step with those gradients, and Module::step_ended() of every module.
// Returns what end_step() of the modules returns.
StepCounts update_weights(TrainedModel& model, const StepOptions& options,
                          const at::Tensor& totals);

// One iteration. With a clock in `timers` every rank reports its times once in steps_per_report()
// steps (sections.h). Communication: besides that of the parts, one all-reduce of the report over
// all ranks.
StepOutcome train_step(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                       const std::function<Batch()>& next_batch, Timers& timers);

// Reads outcomes on the host: one iteration late on a GPU, immediately on a CPU.
class OutcomeReader {
 public:
  explicit OutcomeReader(c10::Device device);
  ~OutcomeReader();
  void push(const StepOutcome& outcome);
  // The oldest outcome that has not been popped; waits for it. Unless `all`, the newest one on a
  // GPU is not returned yet.
  bool pop(StepNumbers& numbers, bool all);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
