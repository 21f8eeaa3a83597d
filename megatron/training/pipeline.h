// The pipeline of a run: how the model is divided over stages and chunks, and their schedule.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/models/model.h"
#include "megatron/pipeline_parallel/encoder_links.h"
#include "megatron/pipeline_parallel/executor.h"
#include "megatron/pipeline_parallel/stage_layout.h"

namespace megatron {

// Not thread safe. Keeps a reference to the groups.
class Pipeline {
 public:
  // `layout`: of the language model where encoders have ranks of their own, `encoder`, which have
  // one chunk of all their layers. Then `language` is the mesh of its ranks.
  //
  // Communication: one element over each link between stages, to establish the connections.
  Pipeline(const PipelineConfig& config, StageLayout layout, const ParallelGroups& groups,
           at::ScalarType dtype, at::Device device, const EncoderRanks& encoder = {},
           const Mesh& language = {});

  int num_chunks() const { return layout_.num_chunks(); }
  bool splits_vocabulary() const { return config_.pipeline_vocab_parallel && num_stages_ > 1; }
  StageSlice slice(int chunk) const { return layout_.slice(stage_, chunk); }
  // Whether this rank is one of the encoders' own.
  bool encodes() const { return encoder_links_ != nullptr && encoder_links_->encodes(); }
  // Whether tensors cross borders of this rank's segments.
  bool has_borders() const { return layout_.segments().size() > 1 || encoder_links_ != nullptr; }
  // Whether the caller has to run every chunk once on its own before the first run(). True only
  // once, with several stages or modules; if not `training`, only if forward passes wait for each
  // other; see Note [Kernels are loaded before pipelines run].
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
    std::vector<ActionTransfers> transfers;  // of this stage; of encoders none
  };
  const Planned& planned(int num_microbatches, bool training);

  const PipelineConfig config_;
  const at::ScalarType dtype_;  // of the model
  const at::Device device_;
  const int stage_, num_stages_;
  const StageLayout scheduled_;  // what the schedule divides: the language model
  const StageLayout layout_;     // of this rank's module
  std::map<std::pair<int, bool>, Planned> planned_;
  std::unique_ptr<PipelineLinks> links_;         // null: this rank has an encoder's part alone
  std::unique_ptr<EncoderLinks> encoder_links_;  // null: encoders have no ranks of their own
  bool needs_warm_up_, forward_needs_warm_up_;
};

}  // namespace megatron
