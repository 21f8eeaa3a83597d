#include "megatron/training/planning/step_estimate.h"

#include <algorithm>

#include "megatron/pipeline_parallel/replay.h"
#include "megatron/training/planning/communication_estimate.h"
#include "megatron/training/planning/layout_check.h"

namespace megatron {

namespace {

// Seconds for a group to send these bytes. `reach`: distance from its first to its last rank in the
// order of the mesh, which decides whether it spans machines.
double seconds(double bytes, int64_t reach, const MachineSpeeds& speeds) {
  return bytes /
         (reach <= speeds.ranks_per_machine ? speeds.inside_bandwidth : speeds.network_bandwidth);
}

GroupTraffic find(const std::vector<GroupTraffic>& all, const char* group) {
  for (const GroupTraffic& traffic : all)
    if (traffic.group == group) return traffic;
  return {group, 1};
}

LayoutPlan without_recomputation(const LayoutPlan& plan) {
  LayoutPlan bare = plan;
  bare.arguments.transformer.recompute_granularity = RecomputeGranularity::kNone;
  bare.arguments.transformer.recompute_modules.clear();
  for (ModuleCost& module : bare.ends.modules) module.again = 0;
  for (EndsCost& ends : bare.segment_ends)
    for (ModuleCost& module : ends.modules) module.again = 0;
  return bare;
}

ScheduleCosts in_seconds(ScheduleCosts costs, double unit) {
  for (std::vector<PassCosts>& chunks : costs.passes)
    for (PassCosts& pass : chunks)
      pass = {pass.forward * unit, pass.backward_input * unit, pass.backward_weight * unit};
  costs.head *= unit;
  costs.loss *= unit;
  return costs;
}

// Multiply-adds of attention in a chunk that transfers between context ranks can overlap with.
double overlapping_products(const LayoutPlan& plan, int stage, int chunk) {
  const StageSlice slice = plan.stages.slice(stage, chunk);
  double products = 0;
  for (int64_t i = 0; i < slice.num_layers; ++i) {
    const LayerCost layer = plan.layer_cost(slice.first_layer + i + 1);
    for (const SublayerCost* half : {&layer.first, &layer.second})
      if (half->overlaps_context) products += half->score_products;
  }
  return products;
}

// Exposed time of data parallelism on a stage whose micro-batch takes so long to compute.
double data_seconds(const LayoutPlan& plan, const MachineSpeeds& speeds,
                    const std::vector<GroupTraffic>& traffic, double forward, double backward) {
  const DistributedDataParallelConfig& ddp = plan.arguments.ddp;
  const auto passes = static_cast<double>(plan.num_microbatches);
  const int64_t reach = plan.tensor * plan.context * plan.data *
                        (plan.arguments.parallel.use_tp_pp_dp_mapping ? plan.pipeline : 1);
  double exposed = 0;
  const auto beside = [](double time, double compute, bool overlaps) {
    return overlaps ? std::max(0.0, time - compute) : time;
  };
  for (const char* group : {"dp", "edp"}) {
    const GroupTraffic dp = find(traffic, group);
    if (dp.ranks <= 1) continue;
    const double values =
        plan.sharding.values ? 0.0
        : plan.sharding.shards > 1
            ? static_cast<double>(plan.bytes.model) /
                  static_cast<double>(plan.bytes.model +
                                      (ddp.grad_reduce_in_bf16 ? 2 : plan.bytes.sum))
            : 0.0;  // fraction of the traffic that is sent once per step
    const double once = seconds(dp.once, reach, speeds),
                 weights = plan.sharding.gradients ? once : values * once;
    exposed += beside(once - weights, backward, ddp.overlap_grad_reduce);
    exposed += beside(weights, forward, ddp.overlap_param_gather);
    exposed += passes * beside(seconds(dp.forward / passes, reach, speeds), forward,
                               ddp.overlap_param_gather);
    exposed += passes * beside(seconds(dp.backward / passes, reach, speeds), backward,
                               ddp.overlap_grad_reduce);
  }
  return exposed + (seconds(find(traffic, "tp").once, plan.tensor, speeds) +
                    seconds(find(traffic, "embd").once, plan.arguments.world_size, speeds));
}

// Mean over the stages of what their passes compute.
double ideal_seconds(const LayoutPlan& plan, const ScheduleCosts& costs) {
  const auto passes = static_cast<double>(plan.num_microbatches);
  double all = 0;
  for (const std::vector<PassCosts>& stage : costs.passes) {
    for (const PassCosts& pass : stage)
      all += passes * (pass.forward + pass.backward_input + pass.backward_weight);
    all += passes * (costs.head + costs.loss);
  }
  return all / static_cast<double>(plan.pipeline);
}

// Traffic of every stage, and how it is divided.
struct StageTraffic {
  std::vector<std::vector<GroupTraffic>> stages;
  double share = 1;  // passes of all chunks of a stage: a pass sends 1 / share of its traffic
};

// Tensor parallelism is exposed in the forward, and in the backward unless half of the weight
// gradients' time hides it.
void add_tensor_traffic(const LayoutPlan& plan, const MachineSpeeds& speeds,
                        const StageTraffic& traffic, ScheduleCosts& costs) {
  for (size_t stage = 0; stage < costs.passes.size(); ++stage) {
    const GroupTraffic tp = find(traffic.stages[stage], "tp");
    for (PassCosts& pass : costs.passes[stage]) {
      const double backward = seconds(tp.backward / traffic.share, plan.tensor, speeds);
      pass.forward += seconds(tp.forward / traffic.share, plan.tensor, speeds);
      pass.backward_input += backward - std::min(backward / 2, pass.backward_weight);
    }
  }
}

// Context parallelism overlaps with attention, one multiply-add of which takes `unit` seconds.
void add_context_traffic(const LayoutPlan& plan, const MachineSpeeds& speeds,
                         const StageTraffic& traffic, double unit, ScheduleCosts& costs) {
  const int64_t reach = plan.tensor * plan.context;
  for (size_t stage = 0; stage < costs.passes.size(); ++stage) {
    const GroupTraffic cp = find(traffic.stages[stage], "cp");
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
      PassCosts& pass = costs.passes[stage][static_cast<size_t>(chunk)];
      const double attention = overlapping_products(plan, static_cast<int>(stage), chunk) * unit;
      pass.forward += std::max(0.0, seconds(cp.forward / traffic.share, reach, speeds) - attention);
      pass.backward_input +=
          std::max(0.0, seconds(cp.backward / traffic.share, reach, speeds) - 2 * attention);
    }
  }
}

// The tokens of the other ranks come before the experts, and their sums after them.
void add_expert_traffic(const LayoutPlan& plan, const MachineSpeeds& speeds,
                        const StageTraffic& traffic, ScheduleCosts& costs) {
  const int64_t reach = plan.tensor * plan.expert;
  for (size_t stage = 0; stage < costs.passes.size(); ++stage) {
    for (const char* group : {"ep", "etp"}) {
      const GroupTraffic sent = find(traffic.stages[stage], group);
      for (PassCosts& pass : costs.passes[stage]) {
        pass.forward += seconds(sent.forward / traffic.share, reach, speeds);
        pass.backward_input += seconds(sent.backward / traffic.share, reach, speeds);
      }
    }
  }
}

}  // namespace

StepEstimate estimate_step(const LayoutPlan& plan, const MachineSpeeds& speeds) {
  const double products = unit_products(plan);
  // Seconds of the first layer's forward on one rank, the unit of schedule_costs().
  const double unit = 2 * products * static_cast<double>(plan.tokens()) /
                      static_cast<double>(plan.tensor) / speeds.flops;
  ScheduleCosts costs = in_seconds(compute_costs(without_recomputation(plan)), unit);
  StepEstimate step;
  step.ideal = ideal_seconds(plan, costs);
  double before = step.ideal;
  const auto took_more = [&] {
    const double now = replay(plan.schedule, costs).makespan, more = now - before;
    before = now;
    return more;
  };
  step.schedule = took_more();
  costs = in_seconds(compute_costs(plan), unit);
  step.recompute = took_more();

  StageTraffic traffic;
  traffic.share = static_cast<double>(plan.num_microbatches) * plan.stages.num_chunks();
  for (int stage = 0; stage < plan.pipeline; ++stage)
    traffic.stages.push_back(stage_traffic(plan, stage));
  const ScheduleCosts computed = costs;
  add_tensor_traffic(plan, speeds, traffic, costs);
  step.tensor = took_more();
  add_context_traffic(plan, speeds, traffic, unit / products, costs);
  step.context = took_more();
  add_expert_traffic(plan, speeds, traffic, costs);
  step.expert = took_more();
  if (plan.pipeline > 1) {
    const auto bytes = static_cast<double>(plan.transfer_bytes());
    costs.transfer = seconds(bytes, plan.arguments.world_size, speeds);
  }
  step.pipeline = took_more();

  for (size_t stage = 0; stage < computed.passes.size(); ++stage) {
    double forward = 0, backward = 0;
    for (const PassCosts& pass : computed.passes[stage]) {
      forward += pass.forward;
      backward += pass.backward_input + pass.backward_weight;
    }
    step.data =
        std::max(step.data, data_seconds(plan, speeds, traffic.stages[stage], forward, backward));
  }
  return step;
}

}  // namespace megatron
