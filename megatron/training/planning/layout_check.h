// Report of `megatron check` about a valid configuration: layers and memory of each stage, bytes
// sent per step, and the pipeline schedule. Everything is computed: no GPU, no model, no data.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "megatron/pipeline_parallel/replay.h"
#include "megatron/runtime/device_models.h"
#include "megatron/training/planning/checkpoint_plan.h"
#include "megatron/training/planning/communication_estimate.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/planning/memory_estimate.h"
#include "megatron/training/planning/step_estimate.h"
#include "megatron/transformer/moe/moe_cost.h"

namespace megatron {

struct StageReport {
  // Parameters of this stage, over its tensor ranks; a copy of a tied table is not counted
  int64_t logical_parameters = 0;
  StageMemory memory;
  std::vector<GroupTraffic> traffic;
  double idle = 0;  // fraction of the step in which the stage waits
};

// A layer of experts, and the stage that needs most memory, when the busiest rank's experts have
// `load` times a balanced share of rows.
struct ExpertLoadReport {
  std::string name;  // why this load is shown
  double load = 1.0;
  RankExpertRows rows;                               // of a layer and micro-batch
  int64_t allocated = 0;                             // at the peak
  int fullest = 0;                                   // the stage of that
  double expert_bytes = 0, expert_tensor_bytes = 0;  // sent in a step, where that is most
};

// Inputs of the report besides the layout.
struct LayoutQuestions {
  std::optional<MachineSpeeds> speeds;  // none: no step time
  const DeviceModel* device = nullptr;  // null: no verdict
  double checkpoint_bandwidth = 0;  // bytes per second that one rank writes; 0: no checkpoint time
  // Bytes per second that all ranks write together; 0: the sum over the ranks
  double checkpoint_bandwidth_of_all = 0;
};

struct LayoutReport {
  int64_t layers = 0, parameters = 0;              // of the configured model
  int64_t stage_layers = 0, stage_parameters = 0;  // summed over the stages
  std::vector<StageReport> stages;
  std::optional<StageReport> encoders;  // on ranks of their own
  int fullest = 0;                      // stage with the largest peak
  OutsideMemory outside;
  double idle = 0;                             // fraction of all stages' time
  std::vector<ExpertLoadReport> expert_loads;  // ascending; empty: a rank has all experts
  CheckpointPlan checkpoint;
  std::optional<double> checkpoint_seconds;
  std::optional<StepEstimate> step;
  std::optional<DeviceVerdict> verdict;
};

// Throws InternalError if the stages together do not hold the configured model.
LayoutReport make_layout_report(const LayoutPlan& plan, const LayoutQuestions& questions = {});

// Multiply-adds per token in the first layer: the unit of compute_costs().
double unit_products(const LayoutPlan& plan);

// Relative times of the passes of every chunk by their operations; the forward of the first layer
// takes 1.
ScheduleCosts compute_costs(const LayoutPlan& plan);
// compute_costs(), or --zero-bubble-pass-times if given.
ScheduleCosts schedule_costs(const LayoutPlan& plan);

// The report for a terminal.
std::string layout_text(const LayoutPlan& plan, const LayoutReport& report);
std::string layout_json(const LayoutPlan& plan, const LayoutReport& report);

// The beginning of the schedule, with enough micro-batches to show its phases.
std::string schedule_text(const LayoutPlan& plan, int columns);
std::string schedule_svg(const LayoutPlan& plan);

}  // namespace megatron
