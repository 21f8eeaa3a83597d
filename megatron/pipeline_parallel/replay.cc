#include "megatron/pipeline_parallel/replay.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/transfers.h"

namespace megatron {
namespace {

using Kind = Action::Kind;
constexpr double kNotEnded = std::numeric_limits<double>::infinity();

std::string where(const Schedule& schedule, int stage, size_t action) {
  return cat("schedule ", schedule.name, ": stage ", stage, ", action ", action, " (",
             to_string(schedule.stages[static_cast<size_t>(stage)][action]), ")");
}

// Checks that each pass of each chunk and micro-batch occurs once: F, then B, or I and later W.
// Counts what is held meanwhile.
ReplayedStage check_order(const Schedule& schedule, int stage) {
  struct Done {
    bool forward = false, input = false, weight = false, head = false, loss = false;
  };
  const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
  std::vector<Done> passes(static_cast<size_t>(schedule.num_chunks) *
                           static_cast<size_t>(schedule.num_microbatches));
  ReplayedStage out;
  int activations = 0, awaiting = 0, pending = 0;
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& a = actions[i];
    MEGATRON_ASSERT(a.chunk >= 0 && a.chunk < schedule.num_chunks && a.microbatch >= 0 &&
                        a.microbatch < schedule.num_microbatches,
                    where(schedule, stage, i), " is outside of ", schedule.num_chunks,
                    " chunks and ", schedule.num_microbatches, " micro-batches");
    Done& done = passes[static_cast<size_t>(a.chunk * schedule.num_microbatches + a.microbatch)];
    if (a.kind == Kind::kHead || a.kind == Kind::kLoss) {
      const bool loss = a.kind == Kind::kLoss;
      MEGATRON_ASSERT(schedule.vocab_parallel, where(schedule, stage, i),
                      " has no part of the vocabulary");
      MEGATRON_ASSERT(!loss || done.head, where(schedule, stage, i), " comes before its logits");
      MEGATRON_ASSERT(!(loss ? done.loss : done.head), where(schedule, stage, i), " is done twice");
      MEGATRON_ASSERT(loss || stage < schedule.num_stages - 1 || done.forward,
                      where(schedule, stage, i), " comes before its forward pass");
      (loss ? done.loss : done.head) = true;
      continue;
    }
    const bool input = a.kind == Kind::kBackward || a.kind == Kind::kBackwardInput;
    const bool weight = a.kind == Kind::kBackward || a.kind == Kind::kBackwardWeight;
    MEGATRON_ASSERT(a.kind == Kind::kForward || done.forward, where(schedule, stage, i),
                    " comes before its forward pass");
    MEGATRON_ASSERT(a.kind != Kind::kBackwardWeight || done.input, where(schedule, stage, i),
                    " comes before its input gradient");
    MEGATRON_ASSERT(!(a.kind == Kind::kForward && done.forward) && !(input && done.input) &&
                        !(weight && done.weight),
                    where(schedule, stage, i), " is done twice");
    if (a.kind == Kind::kForward) done.forward = true, ++activations, ++awaiting;
    if (input) done.input = true, --awaiting, ++pending;
    if (weight) done.weight = true, --activations, --pending;
    out.peak_activations = std::max(out.peak_activations, activations);
    out.peak_awaiting_gradient = std::max(out.peak_awaiting_gradient, awaiting);
    out.peak_pending_weight = std::max(out.peak_pending_weight, pending);
  }
  for (int chunk = 0; chunk < schedule.num_chunks; ++chunk) {
    for (int m = 0; m < schedule.num_microbatches; ++m) {
      const Done& done = passes[static_cast<size_t>(chunk * schedule.num_microbatches + m)];
      const bool whole = done.forward && (schedule.forward_only || (done.input && done.weight));
      MEGATRON_ASSERT(whole, "schedule ", schedule.name, ": stage ", stage, " leaves out ",
                      !done.forward ? "F"
                      : done.input  ? "W"
                                    : "B",
                      chunk, ".", m);
      MEGATRON_ASSERT(!schedule.vocab_parallel || (done.head && done.loss), "schedule ",
                      schedule.name, ": stage ", stage, " leaves out ", done.head ? "L" : "H",
                      chunk, ".", m);
      MEGATRON_ASSERT(!schedule.forward_only || !done.input, "schedule ", schedule.name, ": stage ",
                      stage, " runs B", chunk, ".", m, " in a forward-only schedule");
    }
  }
  return out;
}

class Replayer {
 public:
  Replayer(const Schedule& schedule, const ScheduleCosts& costs, TransferMode mode)
      : schedule_(schedule),
        costs_(costs),
        mode_(mode),
        plan_(plan_transfers(schedule)),
        ranks_(schedule.stages.size()) {
    for (std::vector<Call>& calls : calls_)
      calls.resize(schedule.vocab_parallel ? static_cast<size_t>(schedule.num_microbatches) : 0);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (schedule.vocab_parallel)
        ranks_[r].hidden_calls =
            megatron::hidden_calls(schedule, static_cast<int>(r), mode != TransferMode::kOnDemand);
      ranks_[r].ended.assign(schedule.stages[r].size(), kNotEnded);
      for (size_t i = 0; i < plan_[r].size(); ++i)
        if (const Transfer& send = plan_[r][i].send; send.any())
          ranks_[static_cast<size_t>(send.peer)].from[static_cast<int>(r)].made_by.push_back(i);
    }
  }

  // `stages`: results of check_order().
  Replay run(std::vector<ReplayedStage> stages) {
    Replay out;
    out.stages = std::move(stages);
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < schedule_.num_stages; ++stage)
        while (advance(stage, out.stages[static_cast<size_t>(stage)])) moved = true;
    }
    check_ended();
    double busy = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      out.makespan = std::max(out.makespan, ranks_[r].clock);
      busy += out.stages[r].busy;
    }
    if (out.makespan > 0) out.bubble_fraction = 1 - busy / (out.makespan * schedule_.num_stages);
    return out;
  }

 private:
  // Messages from one sender to one receiver, in the order of sending.
  struct Link {
    std::vector<size_t> made_by;  // the sender's action that produces it
    // times when the receive was posted and when the message had arrived
    std::vector<double> posted, moved;
  };
  // A collective over all stages.
  struct Call {
    int made_by = 0;  // stages that have called it so far
    double last = 0;  // time of the latest of these calls
  };
  enum Joint { kHidden, kStatistics, kHiddenGrad };
  struct Rank {
    std::vector<std::vector<int>> hidden_calls;  // by action
    size_t called = 0;                           // collectives called before the next action
    const Call* held_by = nullptr;
    size_t next = 0;  // next action to run
    double clock = 0;
    std::vector<double> ended;  // end times, by action
    std::map<int, Link> from;   // by sender
  };

  Rank& rank(int stage) { return ranks_[static_cast<size_t>(stage)]; }
  Call& call(Joint joint, int microbatch) { return calls_[joint][static_cast<size_t>(microbatch)]; }
  double end_of(const Call& call) const {
    return call.made_by == schedule_.num_stages ? call.last + costs_.transfer : kNotEnded;
  }
  void make(Rank& self, Call& call) {
    ++call.made_by;
    call.last = std::max(call.last, self.clock);
    if (mode_ == TransferMode::kBlocking) self.held_by = &call;
  }
  // False: the stage is blocked in a collective.
  bool go_on(Rank& self) {
    if (self.held_by == nullptr) return true;
    const double end = end_of(*self.held_by);
    if (end == kNotEnded) return false;
    self.clock = std::max(self.clock, end);
    self.held_by = nullptr;
    return true;
  }
  // When the collective result that the action needs is available.
  double joint_input(int stage, const Action& action) {
    if (!schedule_.vocab_parallel) return 0;
    if (action.kind == Kind::kHead) return end_of(call(kHidden, action.microbatch));
    if (action.kind == Kind::kLoss) return end_of(call(kStatistics, action.microbatch));
    const bool takes = stage == schedule_.num_stages - 1 && action.kind != Kind::kForward;
    return takes ? end_of(call(kHiddenGrad, action.microbatch)) : 0;
  }

  const std::vector<ActionTransfers>& plan(int stage) const {
    return plan_[static_cast<size_t>(stage)];
  }

  // Runs the stage's next action. False: it must wait, or the stage has finished.
  bool advance(int stage, ReplayedStage& out) {
    Rank& self = rank(stage);
    const std::vector<Action>& actions = schedule_.stages[static_cast<size_t>(stage)];
    if (!go_on(self) || self.next == actions.size()) return false;
    post_receive(stage, self.next);
    if (mode_ == TransferMode::kOverlapped)
      post_receive(stage, early_receiver(plan(stage), stage, self.next));
    while (schedule_.vocab_parallel && self.called < self.hidden_calls[self.next].size()) {
      make(self, call(kHidden, self.hidden_calls[self.next][self.called++]));
      if (!go_on(self)) return false;
    }
    const double joint = joint_input(stage, actions[self.next]);
    if (joint == kNotEnded) return false;
    double start = std::max(self.clock, joint);
    if (const Transfer& receive = plan(stage)[self.next].receive; receive.any()) {
      const double there = receive.peer == stage
                               ? self.ended[static_cast<size_t>(receive.peer_action)]
                               : arrival(stage, receive);
      if (there == kNotEnded) return false;
      start = std::max(start, there);
    }
    const double cost = costs_.of(stage, schedule_.num_chunks, actions[self.next]);
    self.clock = start + cost;
    out.actions.push_back({actions[self.next], start, self.clock});
    out.busy += cost;
    const Action& done = actions[self.next];
    self.ended[self.next++] = self.clock;
    self.called = 0;
    if (done.kind == Kind::kHead) make(self, call(kStatistics, done.microbatch));
    if (done.kind == Kind::kLoss && !schedule_.forward_only)
      make(self, call(kHiddenGrad, done.microbatch));
    return true;
  }

  // Like the executor: after the receives of earlier messages on the link.
  void post_receive(int stage, size_t action) {
    if (action >= plan(stage).size()) return;
    const Transfer& receive = plan(stage)[action].receive;
    if (!receive.any() || receive.peer == stage) return;
    Rank& self = rank(stage);
    std::vector<double>& posted = self.from[receive.peer].posted;
    while (static_cast<int>(posted.size()) <= receive.sequence) posted.push_back(self.clock);
  }

  // A message is transferred once it is produced, its receive is posted, and earlier ones have been
  // transferred.
  double arrival(int stage, const Transfer& receive) {
    Link& link = rank(stage).from[receive.peer];
    while (static_cast<int>(link.moved.size()) <= receive.sequence) {
      const size_t k = link.moved.size();
      const double made = rank(receive.peer).ended[link.made_by[k]];
      if (made == kNotEnded) return kNotEnded;
      link.moved.push_back(std::max({made, link.posted[k], k > 0 ? link.moved[k - 1] : 0.0}) +
                           costs_.transfer);
    }
    return link.moved[static_cast<size_t>(receive.sequence)];
  }

  void check_ended() const {
    std::string stuck;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const size_t next = ranks_[r].next;
      if (next == schedule_.stages[r].size()) continue;
      const Transfer& receive = plan_[r][next].receive;
      if (!receive.any() || ranks_[r].held_by != nullptr) {
        stuck += cat(stuck.empty() ? "" : "; ", "stage ", r, " waits at action ", next, " (",
                     to_string(schedule_.stages[r][next]), ") for all stages");
        continue;
      }
      stuck += cat(stuck.empty() ? "" : "; ", "stage ", r, " waits at action ", next, " (",
                   to_string(schedule_.stages[r][next]), ") for ",
                   to_string(schedule_.stages[static_cast<size_t>(receive.peer)]
                                             [static_cast<size_t>(receive.peer_action)]),
                   " of stage ", receive.peer);
    }
    MEGATRON_ASSERT(stuck.empty(), "schedule ", schedule_.name, " deadlocks: ", stuck);
  }

  const Schedule& schedule_;
  const ScheduleCosts& costs_;
  TransferMode mode_;
  std::vector<std::vector<ActionTransfers>> plan_;
  std::vector<Rank> ranks_;
  std::vector<Call> calls_[3];  // by Joint and micro-batch
};

}  // namespace

int Replay::peak_activations() const {
  int most = 0;
  for (const ReplayedStage& stage : stages) most = std::max(most, stage.peak_activations);
  return most;
}

Replay replay(const Schedule& schedule, const ScheduleCosts& costs, TransferMode mode) {
  std::vector<ReplayedStage> stages;
  for (int stage = 0; stage < schedule.num_stages; ++stage)
    stages.push_back(check_order(schedule, stage));
  return Replayer(schedule, costs, mode).run(std::move(stages));
}

}  // namespace megatron
