// Flags of pipeline parallelism. --pipeline-model-parallel-size itself is part of the mesh
// (comm/parallel_groups.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

class StageLayout;

struct PipelineConfig : Config {
  // -- order of work
  ScheduleKind pipeline_schedule = ScheduleKind::k1F1B;
  std::optional<int64_t> microbatch_group_size_per_vp_stage;  // default: the number of stages
  std::optional<int64_t> zero_bubble_max_pending_backward;    // default: twice what 1F1B holds
  std::vector<double> zero_bubble_pass_times;                 // F, I, W, transfer; default: 1 1 1 0

  // -- division of the layers
  bool pipeline_vocab_parallel = false;
  std::optional<int64_t> num_layers_per_virtual_pipeline_stage;
  std::optional<int64_t> num_virtual_stages_per_pipeline_rank;
  std::string pipeline_model_parallel_layout;
  std::optional<int64_t> decoder_first_pipeline_num_layers;
  std::optional<int64_t> decoder_last_pipeline_num_layers;
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;
  int64_t account_for_encoder_in_pipeline_split = 0;  // layers that encoders of media count as
  // The checkpoint that virtual stages were taken from (--use-mp-args-from-checkpoint-args), for
  // messages; no flag
  std::string stored_in;

  // -- derived from --hybrid-layer-pattern, whose layers differ in cost; no flags
  bool hybrid = false;
  std::string hybrid_letters;
  std::vector<int64_t> hybrid_segments;  // layers of each that its `|` end; empty: it has none

  // -- transfers
  bool overlap_p2p_communication = true;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  // The schedule's shape for a pipeline of this size, with the number of chunks that
  // make_stage_layout() chose, assuming equal stages.
  ScheduleShape shape(int64_t pipeline_model_parallel_size, int64_t num_chunks,
                      int64_t num_microbatches) const;
  // The same for a layout, with the costs of its segments unless --zero-bubble-pass-times gives
  // some.
  ScheduleShape shape(const StageLayout& stages, int64_t num_microbatches) const;
};

// Rules that need the mesh and the model: adds one violation for each broken rule. A pipeline of
// one stage accepts no pipeline flags.
void validate_pipeline(const PipelineConfig& config, int64_t pipeline_model_parallel_size,
                       int64_t num_layers, Violations& violations);

}  // namespace megatron
