#include "megatron/pipeline_parallel/detail/zero_bubble_planner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/detail/passes.h"
#include "megatron/pipeline_parallel/replay.h"

namespace megatron {
namespace {

using Kind = Action::Kind;
constexpr double kNotYet = std::numeric_limits<double>::infinity();

// How a stage chooses when not all candidate passes are ready.
struct Policy {
  int max_in_flight;          // limit of passes with held activations, per stage
  bool wait_for_gradient;     // run no forward pass that would delay a gradient in transfer
  bool weight_in_small_gaps;  // run a weight pass even if it delays the next pass
};

// Simulates time; when a stage is free it takes, in this order: the next input gradient, the next
// forward pass (if memory allows), a weight pass.
class Simulation {
 public:
  Simulation(const ScheduleShape& shape, const PassOrder& order, const Policy& policy)
      : shape_(shape),
        order_(order),
        policy_(policy),
        stages_(static_cast<size_t>(shape.num_stages)) {
    const size_t passes = static_cast<size_t>(shape.num_stages * shape.num_chunks) *
                          static_cast<size_t>(shape.num_microbatches);
    forward_end_.assign(passes, kNotYet);
    input_end_.assign(passes, kNotYet);
  }

  // Nullopt: deadlock under this memory limit.
  std::optional<std::vector<std::vector<Action>>> run() {
    while (true) {
      int earliest = 0;
      for (int r = 1; r < shape_.num_stages; ++r)
        if (at(r).decides_at < at(earliest).decides_at) earliest = r;
      if (at(earliest).decides_at == kNotYet) break;
      decide(earliest);
    }
    std::vector<std::vector<Action>> lists;
    for (Stage& stage : stages_) {
      if (stage.weights < order_.size()) return std::nullopt;
      lists.push_back(std::move(stage.actions));
    }
    return lists;
  }

 private:
  struct Stage {
    double free_at = 0;     // end of its last pass
    double decides_at = 0;  // if later than free_at: the stage idles, at most until then
    int forwards = 0, inputs = 0, weights = 0;
    std::vector<Action> actions;
  };
  Stage& at(int r) { return stages_[static_cast<size_t>(r)]; }

  size_t index(int segment, int microbatch) const {
    return static_cast<size_t>(segment) * static_cast<size_t>(shape_.num_microbatches) +
           static_cast<size_t>(microbatch);
  }
  int segment(int r, const Action& a) const {
    return segment_of(ChunkPlacement::kLooped, shape_.num_stages, {r, a.chunk});
  }
  double cost(int r, const Action& a) const { return shape_.costs.of(r, shape_.num_chunks, a); }
  double arrival(double end, int from, int to) const {
    return end + (from % shape_.num_stages == to % shape_.num_stages ? 0.0 : shape_.costs.transfer);
  }

  // When the pass's input is available, if known by now.
  double ready(int r, const Action& a) const {
    const int s = segment(r, a);
    if (a.kind == Kind::kForward)
      return s == 0 ? 0.0 : arrival(forward_end_[index(s - 1, a.microbatch)], s - 1, s);
    const double own = forward_end_[index(s, a.microbatch)];
    if (s + 1 == shape_.num_stages * shape_.num_chunks) return own;
    return std::max(own, arrival(input_end_[index(s + 1, a.microbatch)], s + 1, s));
  }

  void decide(int r) {
    Stage& stage = at(r);
    const double now = stage.decides_at;
    const bool has_forward = stage.forwards < order_.size(),
               has_input = stage.inputs < order_.size();
    const bool has_weight = stage.weights < stage.inputs;
    const double forward_at = has_forward ? ready(r, order_.forward(stage.forwards)) : kNotYet;
    const double input_at =
        has_input ? ready(r, order_.backward(stage.inputs, Kind::kBackwardInput)) : kNotYet;
    const bool room = stage.forwards - stage.weights < policy_.max_in_flight;
    if (input_at <= now) return take(r, order_.backward(stage.inputs++, Kind::kBackwardInput));
    if (forward_at <= now && room) {
      const Action forward = order_.forward(stage.forwards);
      if (!policy_.wait_for_gradient || now + cost(r, forward) <= input_at) {
        ++stage.forwards;
        return take(r, forward);
      }
    }
    const double next = std::min(input_at, room && forward_at > now ? forward_at : kNotYet);
    if (has_weight) {
      const Action weight = order_.backward(stage.weights, Kind::kBackwardWeight);
      const bool needs_room = has_forward && !room && forward_at <= now;
      if (policy_.weight_in_small_gaps || needs_room || now + cost(r, weight) <= next) {
        ++stage.weights;
        return take(r, weight);
      }
    }
    stage.decides_at = next;
  }

  void take(int r, const Action& action) {
    Stage& stage = at(r);
    const int s = segment(r, action);
    const double now = stage.decides_at;
    stage.actions.push_back(action);
    stage.free_at = stage.decides_at = now + cost(r, action);
    if (action.kind == Kind::kForward) forward_end_[index(s, action.microbatch)] = stage.free_at;
    if (action.kind == Kind::kBackwardInput)
      input_end_[index(s, action.microbatch)] = stage.free_at;
    // Waiting stages may have new inputs.
    for (Stage& other : stages_)
      if (other.decides_at > other.free_at) other.decides_at = std::max(other.free_at, now);
  }

  const ScheduleShape& shape_;
  const PassOrder& order_;
  Policy policy_;
  std::vector<Stage> stages_;
  std::vector<double> forward_end_, input_end_;  // by segment and micro-batch
};

// The passes that 1F1B holds on its first stage: a lower limit would deadlock.
int least_in_flight(const PassOrder& order) { return std::min(order.warm_up(0) + 1, order.size()); }

}  // namespace

Schedule plan_zero_bubble(const ScheduleShape& shape, const Schedule& start) {
  const PassOrder order(shape);
  const int least = least_in_flight(order);
  if (shape.max_in_flight > 0 && shape.max_in_flight < least)
    throw UsageError(cat("--zero-bubble-max-pending-backward ", shape.max_in_flight,
                         " is less than the ", least, " that the first of ", shape.num_stages,
                         " stages holds under 1f1b\nhint: at least ", least));
  const int most = shape.max_in_flight > 0 ? shape.max_in_flight : 2 * least;

  Schedule best = start;
  const Replay first = replay(start, shape.costs);
  double makespan = first.makespan;
  int held = first.peak_activations();
  const int step = std::max(1, (most - least) / 8);
  for (int limit = least; limit <= most; limit += step) {
    for (const bool wait_for_gradient : {false, true}) {
      for (const bool weight_in_small_gaps : {false, true}) {
        auto lists =
            Simulation(shape, order, {limit, wait_for_gradient, weight_in_small_gaps}).run();
        if (!lists) continue;
        Schedule candidate = start;
        candidate.stages = std::move(*lists);
        const Replay result = replay(candidate, shape.costs);
        const double slack = 1e-9 * makespan;
        const int result_held = result.peak_activations();
        if (result.makespan > makespan + slack ||
            (result.makespan > makespan - slack && result_held >= held))
          continue;
        best = std::move(candidate);
        makespan = result.makespan;
        held = result_held;
      }
    }
  }
  return best;
}

}  // namespace megatron
