// The state tree of a run, to and from checkpoints.
//
// A checkpoint holds the weights under their own names in the model's type, optimizer.state.*
// beside them, the numbers of RunState, and three kinds of files: config.yaml (the resolved
// configuration), tokenizer/* (the tokenizer's files), and what the model brought along from a
// folder of Hugging Face (huggingface/*, peft/*).
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

// Fills the weights of chunks that have no optimizer, adapters left out: a reference model. Every
// rank calls it.
void load_weights(const Checkpoint& checkpoint, std::vector<ModelChunk>& chunks,
                  Agreement* agreement);

// Whether the checkpoint holds low-rank adapters.
bool has_adapters(const Checkpoint& checkpoint);

// Which parts of a checkpoint a run takes.
struct LoadParts {
  bool optimizer = true;  // masters, moments and the step record; false: weights alone
  bool adapters = true;   // false: the checkpoint holds none, they stay as they are
  const Checkpoint* adapter_source =
      nullptr;                                // what they are taken from in place of the checkpoint
  const Checkpoint* frozen_source = nullptr;  // what frozen weights are taken from, likewise
};

// Fills weights, and with them the optimizer, reading what this rank needs; every rank of
// `agreement` (null: one) calls it. With `parts.optimizer` false element types are converted and
// what the checkpoint holds for the optimizer is left aside. Throws Error naming every tensor that
// does not fit.
void load_model_state(const Checkpoint& checkpoint, const RunState& state,
                      const OptimizerConfig& config, TrainedModel& model, LoadParts parts,
                      Agreement* agreement);

// The files beside the weights.
// `start`: what the run starts from or resumes; what it brought along from a folder of Hugging Face
// stays (origin_files). Null: nothing.
std::vector<std::pair<std::string, std::string>> checkpoint_files(const Arguments& arguments,
                                                                  const Tokenizer& tokenizer,
                                                                  const Checkpoint* start);

// Writes checkpoints as the flags say. Not thread safe.
class Checkpointer {
 public:
  // Keeps references to all of its arguments.
  Checkpointer(const Arguments& arguments, TrainedModel& model, TrainingLog& log, Timers& timers,
               std::vector<std::pair<std::string, std::string>> files, bool replace_existing,
               Agreement* agreement);
  ~Checkpointer();

  // Saves now, or copies now and writes in the background. A failure is reported, and thrown with
  // --save-failure stop. Saving the iteration that was saved last does nothing.
  void save(RunState state);
  // Reports background saves that have ended.
  void poll();
  // Waits for background saves.
  void finish();
  int64_t last_saved() const { return last_saved_; }
  void set_last_saved(int64_t iteration) { last_saved_ = newest_.iteration = iteration; }
  // The newest checkpoint that is known to be on disk; iteration -1: none. Directory and seconds of
  // those that were written here.
  struct Published {
    int64_t iteration = -1;
    std::string directory;
    double longest_seconds = 0;  // of all saves so far, from the call to the publication
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
