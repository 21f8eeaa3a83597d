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
  const GroupTraffic dp = find(traffic, "dp");
  double exposed = 0;
  const auto beside = [](double time, double compute, bool overlaps) {
    return overlaps ? std::max(0.0, time - compute) : time;
  };
  if (dp.ranks > 1) {
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

}  // namespace

StepEstimate estimate_step(const LayoutPlan& plan, const MachineSpeeds& speeds) {
  const double products = unit_products(plan);
  // Seconds of the first layer's forward on one rank, the unit of schedule_costs().
  const double unit = 2 * products * static_cast<double>(plan.tokens()) /
                      static_cast<double>(plan.tensor) / speeds.flops;
  const auto passes = static_cast<double>(plan.num_microbatches);
  ScheduleCosts costs = in_seconds(compute_costs(without_recomputation(plan)), unit);
  const auto stages = static_cast<size_t>(plan.pipeline);
  const int chunks = plan.stages.num_chunks();
  StepEstimate step;
  for (size_t stage = 0; stage < stages; ++stage) {
    for (const PassCosts& pass : costs.passes[stage])
      step.ideal += passes * (pass.forward + pass.backward_input + pass.backward_weight);
    step.ideal += passes * (costs.head + costs.loss);
  }
  step.ideal /= static_cast<double>(stages);

  double before = step.ideal;
  const auto took_more = [&] {
    const double now = replay(plan.schedule, costs).makespan, more = now - before;
    before = now;
    return more;
  };
  step.schedule = took_more();
  costs = in_seconds(compute_costs(plan), unit);
  step.recompute = took_more();

  std::vector<std::vector<GroupTraffic>> traffic;
  for (size_t stage = 0; stage < stages; ++stage)
    traffic.push_back(stage_traffic(plan, static_cast<int>(stage)));
  const double share = passes * chunks;  // a chunk's part of a stage's traffic per pass
  const ScheduleCosts computed = costs;
  for (size_t stage = 0; stage < stages; ++stage) {
    const GroupTraffic tp = find(traffic[stage], "tp");
    for (PassCosts& pass : costs.passes[stage]) {
      const double backward = seconds(tp.backward / share, plan.tensor, speeds);
      pass.forward += seconds(tp.forward / share, plan.tensor, speeds);
      pass.backward_input += backward - std::min(backward / 2, pass.backward_weight);
    }
  }
  step.tensor = took_more();
  for (size_t stage = 0; stage < stages; ++stage) {
    const GroupTraffic cp = find(traffic[stage], "cp");
    for (int chunk = 0; chunk < chunks; ++chunk) {
      PassCosts& pass = costs.passes[stage][static_cast<size_t>(chunk)];
      const double attention =
          overlapping_products(plan, static_cast<int>(stage), chunk) * unit / products;
      pass.forward += std::max(
          0.0, seconds(cp.forward / share, plan.tensor * plan.context, speeds) - attention);
      pass.backward_input += std::max(
          0.0, seconds(cp.backward / share, plan.tensor * plan.context, speeds) - 2 * attention);
    }
  }
  step.context = took_more();
  if (plan.pipeline > 1) {
    const auto bytes = static_cast<double>(plan.stream_bytes());
    costs.transfer = seconds(bytes, plan.arguments.world_size, speeds);
  }
  step.pipeline = took_more();

  for (size_t stage = 0; stage < stages; ++stage) {
    double forward = 0, backward = 0;
    for (const PassCosts& pass : computed.passes[stage]) {
      forward += pass.forward;
      backward += pass.backward_input + pass.backward_weight;
    }
    step.data = std::max(step.data, data_seconds(plan, speeds, traffic[stage], forward, backward));
  }
  return step;
}

}  // namespace megatron
