#include "megatron/pipeline_parallel/schedule.h"

#include <algorithm>
#include <array>

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/detail/passes.h"
#include "megatron/pipeline_parallel/detail/zero_bubble_planner.h"

namespace megatron {
namespace {

using Kind = Action::Kind;

Schedule empty_schedule(const ScheduleShape& shape, ChunkPlacement placement) {
  Schedule schedule;
  schedule.num_stages = shape.num_stages;
  schedule.num_chunks = shape.num_chunks;
  schedule.num_microbatches = shape.num_microbatches;
  schedule.placement = placement;
  schedule.stages.resize(static_cast<size_t>(shape.num_stages));
  return schedule;
}

// `warm_up` forward passes, then alternating forward and backward passes, then the remaining
// backward passes.
std::vector<Action> forward_backward_by_turns(const PassOrder& order, int warm_up) {
  std::vector<Action> actions;
  const int total = order.size();
  for (int k = 0; k < total + warm_up; ++k) {
    if (k < total) actions.push_back(order.forward(k));
    if (k >= warm_up) actions.push_back(order.backward(k - warm_up, Kind::kBackward));
  }
  return actions;
}

// As above with split backward passes. W follows its I after `lag` further passes, so that
// gradients other stages wait for go first; the last W passes fill the bubble at the end.
std::vector<Action> forward_backward_weight_by_turns(const PassOrder& order, int warm_up, int lag) {
  std::vector<Action> actions;
  const int total = order.size();
  for (int k = 0; k < total + warm_up + lag; ++k) {
    if (k < total) actions.push_back(order.forward(k));
    if (k >= warm_up && k < total + warm_up)
      actions.push_back(order.backward(k - warm_up, Kind::kBackwardInput));
    if (k >= warm_up + lag)
      actions.push_back(order.backward(k - warm_up - lag, Kind::kBackwardWeight));
  }
  return actions;
}

// No stage waits for the input gradient of the first segment: consecutive I and W become one pass.
void join_passes_of_first_segment(Schedule& schedule) {
  const SegmentPlace first = schedule.place(0);
  std::vector<Action> joined;
  for (const Action& action : schedule.stages[static_cast<size_t>(first.stage)]) {
    if (action.kind == Kind::kBackwardWeight && action.chunk == first.chunk && !joined.empty() &&
        joined.back() == Action{Kind::kBackwardInput, action.chunk, action.microbatch})
      joined.back().kind = Kind::kBackward;
    else
      joined.push_back(action);
  }
  schedule.stages[static_cast<size_t>(first.stage)] = std::move(joined);
}

// Kinds of passes that a stage runs in rotation; `ahead` is by how many micro-batches a kind leads
// the last kind.
struct Turn {
  Kind kind;
  int ahead;
};
std::vector<Action> by_turns(int num_microbatches, const std::vector<Turn>& turns) {
  std::vector<Action> actions;
  for (int k = -turns.front().ahead; k < num_microbatches; ++k)
    for (const Turn& turn : turns)
      if (const int m = k + turn.ahead; m >= 0 && m < num_microbatches)
        actions.push_back({turn.kind, 0, m});
  return actions;
}

// Note [Vocabulary split over stages]
// Between the last stage's F and B of a micro-batch every stage runs H and L, with one collective
// over all stages between H and L and one after L. The last stage does other work meanwhile: its F
// is two micro-batches ahead of its B, and so are all stages before it, which hold two more
// activations than under 1F1B. L of a micro-batch and H of the next are adjacent on every stage, so
// that all stages make their collectives in one order: a blocked collective delays all stages at
// the same point.
//
// An earlier stage runs H and L when the last stage does, that is some backward passes before its
// own B: F and B of consecutive stages are one pass of each apart, and B's share of that time,
// between two thirds (B = 2 F) and three quarters (recomputation), is the lead. Replayed with three
// quarters, both cases are within 5 % of the bound (M + P - 1) (F + B) + M (H + L) up to 8 stages.
int head_lead(int num_stages, int stage) { return 1 + (3 * (num_stages - 1 - stage) + 2) / 4; }

Schedule one_forward_one_backward_with_head(const ScheduleShape& shape) {
  Schedule schedule = empty_schedule(shape, ChunkPlacement::kLooped);
  schedule.vocab_parallel = true;
  for (int r = 0; r < shape.num_stages; ++r) {
    const int lead = head_lead(shape.num_stages, r);
    schedule.stages[static_cast<size_t>(r)] =
        by_turns(shape.num_microbatches, {{Kind::kForward, shape.num_stages - r + 1},
                                          {Kind::kLoss, lead - 1},
                                          {Kind::kHead, lead},
                                          {Kind::kBackward, 0}});
  }
  return schedule;
}

// 1F1B: the warm-up is just long enough for the first gradient to arrive when it ends.
Schedule one_forward_one_backward(const ScheduleShape& shape) {
  if (shape.vocab_parallel) return one_forward_one_backward_with_head(shape);
  Schedule schedule = empty_schedule(shape, ChunkPlacement::kLooped);
  const PassOrder order(shape);
  for (int r = 0; r < shape.num_stages; ++r)
    schedule.stages[static_cast<size_t>(r)] = forward_backward_by_turns(order, order.warm_up(r));
  return schedule;
}

// All forward passes, then all backward passes; every activation is held.
Schedule gpipe(const ScheduleShape& shape) {
  Schedule schedule = empty_schedule(shape, ChunkPlacement::kLooped);
  const PassOrder order(shape);
  for (std::vector<Action>& actions : schedule.stages)
    actions = forward_backward_by_turns(order, order.size());
  return schedule;
}

// ZB-H1: 1F1B with split backward passes. Stage r delays r weight passes, so that every stage holds
// as much as the first one does under 1F1B. With virtual stages: the same over the interleaved
// order.
Schedule zero_bubble_h1(const ScheduleShape& shape) {
  Schedule schedule = empty_schedule(shape, ChunkPlacement::kLooped);
  const PassOrder order(shape);
  for (int r = 0; r < shape.num_stages; ++r)
    schedule.stages[static_cast<size_t>(r)] =
        forward_backward_weight_by_turns(order, order.warm_up(r), r);
  join_passes_of_first_segment(schedule);
  return schedule;
}

// The best of ZB-H1 and the planner's schedules: shortest replayed time, on a tie lowest memory.
Schedule zero_bubble_auto(const ScheduleShape& shape) {
  Schedule schedule = plan_zero_bubble(shape, zero_bubble_h1(shape));
  join_passes_of_first_segment(schedule);
  return schedule;
}

// Adds the passes of one stage in order and numbers micro-batches by counting. Passes beyond the
// last micro-batch are dropped, so that the pattern for many micro-batches also serves for few.
class StageWriter {
 public:
  StageWriter(std::vector<Action>& actions, int num_microbatches)
      : actions_(actions), num_microbatches_(num_microbatches) {}
  void forward(int chunk) { add(Kind::kForward, chunk, forwards_[chunk]++); }
  void backward_input(int chunk) { add(Kind::kBackwardInput, chunk, inputs_[chunk]++); }
  void backward_weight(int chunk) { add(Kind::kBackwardWeight, chunk, weights_[chunk]++); }
  void backward(int chunk) {
    backward_input(chunk);
    backward_weight(chunk);
  }
  int forwards(int chunk) const { return forwards_[chunk]; }
  int pending_weights(int chunk) const { return inputs_[chunk] - weights_[chunk]; }

 private:
  void add(Kind kind, int chunk, int microbatch) {
    if (microbatch < num_microbatches_) actions_.push_back({kind, chunk, microbatch});
  }
  std::vector<Action>& actions_;
  int num_microbatches_;
  int forwards_[2] = {}, inputs_[2] = {}, weights_[2] = {};
};

// ZB-V. The last segment is on the same stage as the first: its backward can start as soon as its
// forward has ended, without waiting for another stage. Peak memory is 1F1B's.
Schedule zero_bubble_v(const ScheduleShape& shape) {
  Schedule schedule = empty_schedule(shape, ChunkPlacement::kVShaped);
  const int stages = shape.num_stages;
  // The pattern needs at least as many
  const int microbatches = std::max(shape.num_microbatches, 2 * stages - 1);
  for (int r = 0; r < stages; ++r) {
    StageWriter out(schedule.stages[static_cast<size_t>(r)], shape.num_microbatches);
    // Warm-up: down, then down and up, until the first micro-batch's gradient arrives.
    for (int i = 0; i < 2 * (stages - r) - 1; ++i) out.forward(0);
    for (int i = 0; i < r; ++i) out.forward(1), out.forward(0);
    for (int i = 0; i < stages - r; ++i) out.forward(1), out.backward(1);
    // Steady: one forward and one full backward of each chunk.
    while (out.forwards(1) < out.forwards(0) || out.forwards(0) < microbatches) {
      if (out.forwards(0) < microbatches) out.forward(0);
      out.backward(0);
      out.forward(1);
      out.backward(1);
    }
    // Cool-down: input gradients first, weight passes where the stage would wait.
    for (int i = 0; i < r; ++i) out.backward_input(0), out.backward_input(1);
    for (int i = 0; i < stages - r; ++i) out.backward_input(0), out.backward_weight(0);
    while (out.pending_weights(1) > 0) out.backward_weight(1);
    while (out.pending_weights(0) > 0) out.backward_weight(0);
  }
  join_passes_of_first_segment(schedule);
  return schedule;
}

// The one table of schedule kinds: flags, checks and generators use it.
struct KindRow {
  std::string_view name;
  ChunkPlacement placement;
  Schedule (*make)(const ScheduleShape&);
};
constexpr std::array<KindRow, 5> kKinds = {
    {{"1f1b", ChunkPlacement::kLooped, one_forward_one_backward},
     {"gpipe", ChunkPlacement::kLooped, gpipe},
     {"zb-h1", ChunkPlacement::kLooped, zero_bubble_h1},
     {"zb-auto", ChunkPlacement::kLooped, zero_bubble_auto},
     {"zb-v", ChunkPlacement::kVShaped, zero_bubble_v}}};

const KindRow& row(ScheduleKind kind) { return kKinds[static_cast<size_t>(kind)]; }

void check_sizes(const KindRow& kind, const ScheduleShape& shape) {
  MEGATRON_ASSERT(shape.num_stages >= 1 && shape.num_chunks >= 1, shape.num_stages, " stages of ",
                  shape.num_chunks, " chunks");
  if (shape.num_microbatches < 1)
    throw UsageError(cat("a pipeline schedule over ", shape.num_microbatches,
                         " micro-batches\nhint: at least 1"));
  if (kind.placement == ChunkPlacement::kVShaped && shape.num_chunks != 2)
    throw UsageError(cat("--pipeline-schedule ", kind.name,
                         " takes 2 virtual stages per pipeline rank, not ", shape.num_chunks,
                         "\nhint: --num-virtual-stages-per-pipeline-rank 2"));
  if (shape.vocab_parallel && (kind.name != "1f1b" || shape.num_chunks != 1))
    throw UsageError(
        cat("--pipeline-vocab-parallel is built for --pipeline-schedule 1f1b without virtual "
            "stages, not for ",
            kind.name, " of ", shape.num_chunks, shape.num_chunks == 1 ? " chunk" : " chunks",
            " per rank\nhint: leave one of them out"));
}

// Micro-batch groups of the interleaved order. Every chunk must have filled the pipeline before the
// next chunk starts, or its first micro-batch would not have returned yet.
void check_groups(const ScheduleShape& shape) {
  const int stages = shape.num_stages, microbatches = shape.num_microbatches;
  if (shape.num_chunks == 1 || stages == 1) return;
  if (microbatches < stages)
    throw UsageError(cat("virtual pipeline stages need at least --pipeline-model-parallel-size ",
                         stages, " micro-batches, there are ", microbatches,
                         "\nhint: raise --global-batch-size to ", stages,
                         " micro-batches per data-parallel rank"));
  const auto legal = [&](int group) {
    return group >= stages && group <= microbatches &&
           (microbatches % group == 0 || microbatches % group >= stages);
  };
  const int group = shape.group_size == 0 ? stages : shape.group_size;
  if (legal(group)) return;
  int below = group, above = group;
  while (below > 0 && !legal(below)) --below;
  while (above <= microbatches && !legal(above)) ++above;
  // One group of all micro-batches is always legal.
  std::string nearest = below > 0 ? cat(below) : "";
  if (above <= microbatches) nearest += cat(nearest.empty() ? "" : " or ", above);
  const std::string flag = "--microbatch-group-size-per-virtual-pipeline-stage";
  if (group < stages || group > microbatches)
    throw UsageError(cat(flag, " ", group, " is not between --pipeline-model-parallel-size ",
                         stages, " and the ", microbatches,
                         " micro-batches of a step\nhint: the nearest legal value is ", nearest));
  throw UsageError(cat(microbatches, " micro-batches in groups of ", group,
                       " leave a last group of ", microbatches % group,
                       ", fewer than --pipeline-model-parallel-size ", stages, "\nhint: ", flag,
                       " ", nearest, ", or ", microbatches - microbatches % group, " or ",
                       microbatches - microbatches % group + group, " micro-batches"));
}

}  // namespace

int segment_of(ChunkPlacement placement, int num_stages, SegmentPlace place) {
  if (placement == ChunkPlacement::kVShaped && place.chunk == 1)
    return 2 * num_stages - 1 - place.stage;
  return place.chunk * num_stages + place.stage;
}

SegmentPlace place_of(ChunkPlacement placement, int num_stages, int segment) {
  const int chunk = segment / num_stages, along = segment % num_stages;
  return {placement == ChunkPlacement::kVShaped && chunk == 1 ? num_stages - 1 - along : along,
          chunk};
}

std::span<const std::string_view> schedule_names() {
  static const std::array<std::string_view, kKinds.size()> names = [] {
    std::array<std::string_view, kKinds.size()> out;
    for (size_t i = 0; i < kKinds.size(); ++i) out[i] = kKinds[i].name;
    return out;
  }();
  return names;
}

ChunkPlacement schedule_placement(ScheduleKind kind) { return row(kind).placement; }

double PassCosts::of(Action::Kind kind) const {
  switch (kind) {
    case Kind::kForward:
      return forward;
    case Kind::kBackward:
      return backward_input + backward_weight;
    case Kind::kBackwardInput:
      return backward_input;
    case Kind::kBackwardWeight:
      return backward_weight;
    case Kind::kHead:
    case Kind::kLoss:
      break;  // per stage, not per chunk
  }
  return 0.0;
}

double ScheduleCosts::of(int stage, int num_chunks, const Action& action) const {
  if (action.kind == Action::Kind::kHead) return head;
  if (action.kind == Action::Kind::kLoss) return loss;
  if (passes.empty()) return whole_stage.of(action.kind) / num_chunks;
  return passes.at(static_cast<size_t>(stage))
      .at(static_cast<size_t>(action.chunk))
      .of(action.kind);
}

Schedule make_schedule(ScheduleKind kind, const ScheduleShape& shape) {
  check_sizes(row(kind), shape);
  if (row(kind).placement == ChunkPlacement::kLooped) check_groups(shape);
  Schedule schedule = row(kind).make(shape);
  schedule.name = row(kind).name;
  return schedule;
}

Schedule make_forward_schedule(ScheduleKind kind, const ScheduleShape& shape) {
  check_sizes(row(kind), shape);
  Schedule schedule = empty_schedule(shape, row(kind).placement);
  schedule.name = "forward-only";
  schedule.forward_only = true;
  if (shape.vocab_parallel) {
    schedule.vocab_parallel = true;
    for (int r = 0; r < shape.num_stages; ++r)
      schedule.stages[static_cast<size_t>(r)] = by_turns(
          shape.num_microbatches,
          {{Kind::kForward, shape.num_stages - r + 1}, {Kind::kLoss, 0}, {Kind::kHead, 1}});
    return schedule;
  }
  const PassOrder order(shape);
  for (std::vector<Action>& actions : schedule.stages)
    for (int k = 0; k < order.size(); ++k) actions.push_back(order.forward(k));
  return schedule;
}

char letter(Action::Kind kind) { return "FBIWHL"[static_cast<int>(kind)]; }

std::string to_string(const Action& action) {
  return cat(letter(action.kind), action.chunk, ".", action.microbatch);
}

std::string to_string(std::span<const Action> actions) {
  std::string text;
  for (const Action& action : actions) text += (text.empty() ? "" : " ") + to_string(action);
  return text;
}

}  // namespace megatron
