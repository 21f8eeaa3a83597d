// The pipeline of a run: how the model is divided over stages and chunks, and the order in which they work.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "megatron/pipeline_parallel/executor.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/tensor/random.h"
#include "megatron/training/arguments.h"

namespace megatron {

// Not thread safe. Keeps a reference to the groups.
class Pipeline {
 public:
  // Communication: one element over each link between stages, so that they are connected.
  Pipeline(const Arguments& arguments, const ParallelGroups& groups, at::ScalarType dtype, at::Device device);

  int num_chunks() const { return layout_.num_chunks(); }
  StageSlice slice(int chunk) const { return layout_.slice(stage_, chunk); }
  const StageLayout& layout() const { return layout_; }

  // Runs this rank's passes of one iteration over `num_microbatches`: training, or forward passes alone. `place_of` gives the
  // places of a micro-batch, whose numbers of samples and positions are the shape of what moves between stages.
  void run(int num_microbatches, bool training, StageCompute& compute,
           const std::function<Place(int microbatch)>& place_of);

 private:
  const Schedule& schedule(int num_microbatches, bool training);

  const PipelineConfig config_;
  const int64_t hidden_size_;
  const int64_t rows_divisor_;  // tensor ranks with sequence parallelism
  const at::ScalarType dtype_;  // of activations between stages
  const at::Device device_;
  const int stage_, num_stages_;
  const StageLayout layout_;
  std::map<std::pair<int, bool>, Schedule> schedules_;
  std::unique_ptr<PipelineLinks> links_;
};

}  // namespace megatron
