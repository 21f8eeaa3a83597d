// The pipeline of a run: how the model is divided over stages and chunks, and their schedule.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "megatron/models/model.h"
#include "megatron/pipeline_parallel/executor.h"
#include "megatron/pipeline_parallel/stage_layout.h"

namespace megatron {

// Not thread safe. Keeps a reference to the groups.
class Pipeline {
 public:
  // Communication: one element over each link between stages, to establish the connections.
  Pipeline(const PipelineConfig& config, StageLayout layout, const ParallelGroups& groups,
           at::ScalarType dtype, at::Device device);

  int num_chunks() const { return layout_.num_chunks(); }
  bool splits_vocabulary() const { return config_.pipeline_vocab_parallel && num_stages_ > 1; }
  StageSlice slice(int chunk) const { return layout_.slice(stage_, chunk); }
  const StageLayout& layout() const { return layout_; }
  // Whether the caller has to run every chunk once on its own before the first run(). True only
  // once, with several stages; if not `training`, only if forward passes wait for each other; see
  // Note [Kernels are loaded before pipelines run].
  bool take_warm_up(bool training) {
    if (training) forward_needs_warm_up_ = false;
    return std::exchange(training ? needs_warm_up_ : forward_needs_warm_up_, false);
  }

  // What crosses a border of the chunk's segment `model` for a micro-batch.
  TensorFormats format(const Model& model, Border border, const Batch& batch) const;

  const PipelineLinks& links() const { return *links_; }

  // Runs this rank's part of the schedule for `num_microbatches` micro-batches: training, or
  // forward only.
  void run(int num_microbatches, bool training, StageCompute& compute);

 private:
  struct Planned {
    Schedule schedule;
    std::vector<ActionTransfers> transfers;  // of this stage
  };
  const Planned& planned(int num_microbatches, bool training);

  const PipelineConfig config_;
  const at::ScalarType dtype_;  // of the model
  const at::Device device_;
  const int stage_, num_stages_;
  const StageLayout layout_;
  std::map<std::pair<int, bool>, Planned> planned_;
  std::unique_ptr<PipelineLinks> links_;
  bool needs_warm_up_, forward_needs_warm_up_;
};

}  // namespace megatron
