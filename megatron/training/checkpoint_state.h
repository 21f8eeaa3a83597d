// Saves and loads the state of a run.
//
// A checkpoint holds the weights under their own names in the model's type, the optimizer's state
// as optimizer.state.*, RunState, and three kinds of files: config.yaml (the resolved
// configuration), tokenizer/* (the tokenizer's files), and the configuration files of an imported
// model (huggingface/*, peft/*).
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/dist_checkpointing/async_saver.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/run_state.h"
#include "megatron/training/train_step.h"
#include "megatron/training/training_log.h"

namespace megatron {

class Upcycling;

// Loads the weights of a reference model: chunks without optimizer; adapters are not loaded.
// Collective.
void load_weights(const Checkpoint& checkpoint, std::vector<ModelChunk>& chunks,
                  Agreement* agreement);

// Whether the checkpoint holds low-rank adapters.
bool has_adapters(const Checkpoint& checkpoint);

// Which parts of a checkpoint to load.
struct LoadParts {
  bool optimizer = true;  // master weights, moments and the step record; false: weights only
  bool adapters = true;   // false: the checkpoint has none; keep them as they are
  // Adapters are loaded from here instead of the checkpoint
  const Checkpoint* adapter_source = nullptr;
  const Checkpoint* frozen_source = nullptr;  // the same for frozen weights
  const Upcycling* upcycling = nullptr;       // the checkpoint is of a dense model
  // Of a model that is joined of parts (interop/model_parts.h): those beside the checkpoint, or
  // beside frozen_source. Null: that is all of a model
  const std::vector<Checkpoint>* encoders = nullptr;
  // Patterns of parameters that the checkpoint may lack, and then keep their values, or have in
  // vain
  std::vector<std::string> heads = {};
  std::string origin =
      {};  // the checkpoint is of this type (ModelType::origin); empty: the model's
};

// Loads weights and optimizer state; each rank reads what it needs. Collective over `agreement`
// (null: one rank). With `parts.optimizer` false element types are converted and optimizer state in
// the checkpoint is ignored. Throws Error naming every tensor that does not fit.
void load_model_state(const Checkpoint& checkpoint, const RunState& state,
                      const OptimizerConfig& config, TrainedModel& model, LoadParts parts,
                      Agreement* agreement);

// The files of a checkpoint besides tensors. `start`: the checkpoint that the run starts from or
// resumes, whose configuration files of an imported model are kept (origin_files); null: none.
std::vector<std::pair<std::string, std::string>> checkpoint_files(const Arguments& arguments,
                                                                  const Tokenizer& tokenizer,
                                                                  const Checkpoint* start);

// Writes checkpoints according to the flags. Not thread safe.
class Checkpointer {
 public:
  // Keeps references to all of its arguments.
  Checkpointer(const Arguments& arguments, TrainedModel& model, TrainingLog& log, Timers& timers,
               std::vector<std::pair<std::string, std::string>> files, bool replace_existing,
               Agreement* agreement);
  ~Checkpointer();

  // Saves now, or copies now and writes in the background. A failure is logged, and thrown with
  // --save-failure stop. No-op if this iteration was the last one saved.
  void save(RunState state);
  // Logs background saves that have completed.
  void poll();
  // Waits for background saves.
  void finish();
  int64_t last_saved() const { return last_saved_; }
  void set_last_saved(int64_t iteration) { last_saved_ = newest_.iteration = iteration; }
  // The newest checkpoint known to be on disk; iteration -1: none. Directory and seconds are set if
  // this process wrote it.
  struct Published {
    int64_t iteration = -1;
    std::string directory;
    double longest_seconds = 0;  // longest save so far, from the call to publication
  };
  const Published& newest() const { return newest_; }
  // Called with newest() when a checkpoint has been published, before anything else can fail.
  void when_published(std::function<void(const Published&)> callback) {
    when_published_ = std::move(callback);
  }
  // How long a save takes: the longest so far, `before` by earlier attempts, or what this rank's
  // state needs at 100 MB/s.
  double expected_seconds(double before);

 private:
  struct Snapshot;
  SaveRequest request(const RunState& state, bool copy, std::shared_ptr<Snapshot>& snapshot);
  void report(const SaveOutcome& outcome);

  const Arguments& arguments_;
  TrainedModel& model_;
  TrainingLog& log_;
  Timers& timers_;
  std::vector<std::pair<std::string, std::string>> files_;
  bool replace_existing_;
  Agreement* agreement_;  // null: one rank
  int64_t last_saved_ = -1;
  Published newest_;
  std::function<void(const Published&)> when_published_;
  double state_bytes_ = 0;  // of this rank, when they were asked for
  std::shared_ptr<Snapshot> snapshot_;
  std::unique_ptr<AsyncSaver> saver_;
  std::vector<std::pair<int64_t, std::chrono::steady_clock::time_point>> started_;
};

// Appends a line to progress.txt (--log-progress).
void log_progress(const TrainingConfig& config, const std::string& text);

}  // namespace megatron
