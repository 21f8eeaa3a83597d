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
constexpr double kNotYet = std::numeric_limits<double>::infinity();

std::string where(const Schedule& schedule, int stage, size_t action) {
  return cat("schedule ", schedule.name, ": stage ", stage, ", action ", action, " (",
             to_string(schedule.stages[static_cast<size_t>(stage)][action]), ")");
}

// Each pass of each chunk and micro-batch once: F, then B, or I and later W. Counts what is held on the way.
ReplayedStage check_order(const Schedule& schedule, int stage) {
  struct Done {
    bool forward = false, input = false, weight = false;
  };
  const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
  std::vector<Done> passes(static_cast<size_t>(schedule.num_chunks) * static_cast<size_t>(schedule.num_microbatches));
  ReplayedStage out;
  int activations = 0, awaiting = 0, pending = 0;
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& a = actions[i];
    MEGATRON_ASSERT(a.chunk >= 0 && a.chunk < schedule.num_chunks && a.microbatch >= 0 && a.microbatch < schedule.num_microbatches,
                    where(schedule, stage, i), " is outside of ", schedule.num_chunks, " chunks and ", schedule.num_microbatches,
                    " micro-batches");
    Done& done = passes[static_cast<size_t>(a.chunk * schedule.num_microbatches + a.microbatch)];
    const bool input = a.kind == Kind::kBackward || a.kind == Kind::kBackwardInput;
    const bool weight = a.kind == Kind::kBackward || a.kind == Kind::kBackwardWeight;
    MEGATRON_ASSERT(a.kind == Kind::kForward || done.forward, where(schedule, stage, i), " comes before its forward pass");
    MEGATRON_ASSERT(a.kind != Kind::kBackwardWeight || done.input, where(schedule, stage, i), " comes before its input gradient");
    MEGATRON_ASSERT(!(a.kind == Kind::kForward && done.forward) && !(input && done.input) && !(weight && done.weight),
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
                      !done.forward ? "F" : done.input ? "W" : "B", chunk, ".", m);
      MEGATRON_ASSERT(!schedule.forward_only || !done.input, "schedule ", schedule.name, ": stage ", stage, " runs B", chunk, ".", m,
                      " in a forward-only schedule");
    }
  }
  return out;
}

class Replayer {
 public:
  Replayer(const Schedule& schedule, const ScheduleCosts& costs, TransferMode mode)
      : schedule_(schedule), costs_(costs), mode_(mode), plan_(plan_transfers(schedule)), ranks_(schedule.stages.size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].ended.assign(schedule.stages[r].size(), kNotYet);
      ranks_[r].exchanging = mode == TransferMode::kBlocking;
    }
  }

  // `stages` by check_order().
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
  // kBlocking: when receives were posted and messages moved, in the order of sending.
  struct Link {
    std::vector<double> posted, moved;
  };
  struct Rank {
    size_t next = 0;          // action to run
    bool exchanging = false;  // kBlocking: the transfers between next - 1 and next are under way
    double clock = 0;
    std::vector<double> ended;   // by action
    std::map<int, Link> from;    // by sender
  };

  Rank& rank(int stage) { return ranks_[static_cast<size_t>(stage)]; }
  const ActionTransfers& transfers(int stage, size_t action) const { return plan_[static_cast<size_t>(stage)][action]; }
  bool crosses(int stage, const Transfer& transfer) const { return transfer.any() && transfer.peer != stage; }

  // Runs the stage's next action, or the transfers before it. False: it has to wait, or has ended.
  bool advance(int stage, ReplayedStage& out) {
    Rank& self = rank(stage);
    if (self.exchanging) return exchange(stage);
    const std::vector<Action>& actions = schedule_.stages[static_cast<size_t>(stage)];
    if (self.next == actions.size()) return false;
    double start = self.clock;
    if (const Transfer& receive = transfers(stage, self.next).receive; receive.any()) {
      const double made = rank(receive.peer).ended[static_cast<size_t>(receive.peer_action)];
      if (made == kNotYet) return false;
      const bool under_way = crosses(stage, receive) && mode_ == TransferMode::kOverlapped;
      start = std::max(start, made + (under_way ? costs_.transfer : 0.0));
    }
    const double cost = costs_.of(stage, schedule_.num_chunks, actions[self.next]);
    self.clock = start + cost;
    out.actions.push_back({actions[self.next], start, self.clock});
    out.busy += cost;
    self.ended[self.next++] = self.clock;
    self.exchanging = mode_ == TransferMode::kBlocking;
    return true;
  }

  // Sends the last action's result and receives the next one's input. False: a peer is not there yet.
  bool exchange(int stage) {
    Rank& self = rank(stage);
    double end = self.clock;
    const bool last = self.next == schedule_.stages[static_cast<size_t>(stage)].size();
    const Transfer receive = last ? Transfer{} : transfers(stage, self.next).receive;
    const Transfer send = self.next == 0 ? Transfer{} : transfers(stage, self.next - 1).send;
    if (crosses(stage, receive)) {
      std::vector<double>& posted = self.from[receive.peer].posted;
      while (static_cast<int>(posted.size()) <= receive.sequence) posted.push_back(self.clock);
      end = std::max(end, arrival(receive.peer, stage, receive.sequence));
    }
    if (crosses(stage, send)) end = std::max(end, arrival(stage, send.peer, send.sequence));
    if (end == kNotYet) return false;
    self.clock = end;
    self.exchanging = false;
    return true;
  }

  // When a message has moved.
  double arrival(int from, int to, int sequence) {
    Link& link = rank(to).from[from];
    while (static_cast<int>(link.moved.size()) <= sequence) {
      const size_t k = link.moved.size();
      const double sent = send_time(from, to, static_cast<int>(k));
      if (k >= link.posted.size() || sent == kNotYet) return kNotYet;
      link.moved.push_back(std::max({sent, link.posted[k], k > 0 ? link.moved[k - 1] : 0.0}) + costs_.transfer);
    }
    return link.moved[static_cast<size_t>(sequence)];
  }

  double send_time(int from, int to, int sequence) {
    std::vector<int>& actions = sends_[{from, to}];
    if (actions.empty()) {
      const std::vector<ActionTransfers>& plan = plan_[static_cast<size_t>(from)];
      for (size_t i = 0; i < plan.size(); ++i)
        if (plan[i].send.peer == to) actions.push_back(static_cast<int>(i));
    }
    const auto action = static_cast<size_t>(actions[static_cast<size_t>(sequence)]);
    return rank(from).ended[action];
  }

  void check_ended() const {
    std::string stuck;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const size_t next = ranks_[r].next;
      const bool sending = next == schedule_.stages[r].size();
      if (sending && !ranks_[r].exchanging) continue;
      const size_t action = sending ? next - 1 : next;
      const Transfer& transfer = sending ? plan_[r][action].send : plan_[r][action].receive;
      stuck += cat(stuck.empty() ? "" : "; ", "stage ", r, " waits at action ", action, " of ", schedule_.stages[r].size(), " (",
                   to_string(schedule_.stages[r][action]), ")");
      if (transfer.any())
        stuck += cat(" for ", to_string(schedule_.stages[static_cast<size_t>(transfer.peer)][static_cast<size_t>(transfer.peer_action)]),
                     " of stage ", transfer.peer);
    }
    MEGATRON_ASSERT(stuck.empty(), "schedule ", schedule_.name, " deadlocks: ", stuck);
  }

  const Schedule& schedule_;
  const ScheduleCosts& costs_;
  TransferMode mode_;
  std::vector<std::vector<ActionTransfers>> plan_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, std::vector<int>> sends_;  // by link: the sender's actions, in order
};

}  // namespace

int Replay::peak_activations() const {
  int most = 0;
  for (const ReplayedStage& stage : stages) most = std::max(most, stage.peak_activations);
  return most;
}

Replay replay(const Schedule& schedule, const ScheduleCosts& costs, TransferMode mode) {
  std::vector<ReplayedStage> stages;
  for (int stage = 0; stage < schedule.num_stages; ++stage) stages.push_back(check_order(schedule, stage));
  return Replayer(schedule, costs, mode).run(std::move(stages));
}

}  // namespace megatron
