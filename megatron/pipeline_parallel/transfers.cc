#include "megatron/pipeline_parallel/transfers.h"

#include <algorithm>
#include <map>
#include <set>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Kind = Action::Kind;

// The tensors between segments: index = (backward, receiving segment, micro-batch).
class Crossings {
 public:
  explicit Crossings(const Schedule& schedule) : schedule_(schedule) {}

  size_t size() const {
    return 2 * static_cast<size_t>(schedule_.num_segments()) *
           static_cast<size_t>(schedule_.num_microbatches);
  }
  // The tensor that the action uses or produces; -1: none.
  int64_t received(int stage, const Action& action) const {
    const int segment = schedule_.segment(stage, action.chunk);
    if (!crosses(action.kind)) return -1;
    if (action.kind == Kind::kForward) return segment > 0 ? index(false, segment, action) : -1;
    return segment + 1 < schedule_.num_segments() ? index(true, segment, action) : -1;
  }
  int64_t sent(int stage, const Action& action) const {
    const int segment = schedule_.segment(stage, action.chunk);
    if (!crosses(action.kind)) return -1;
    if (action.kind == Kind::kForward)
      return segment + 1 < schedule_.num_segments() ? index(false, segment + 1, action) : -1;
    return segment > 0 ? index(true, segment - 1, action) : -1;
  }

 private:
  static bool crosses(Kind kind) {
    return kind == Kind::kForward || kind == Kind::kBackward || kind == Kind::kBackwardInput;
  }
  int64_t index(bool backward, int segment, const Action& action) const {
    return (static_cast<int64_t>(backward) * schedule_.num_segments() + segment) *
               schedule_.num_microbatches +
           action.microbatch;
  }
  const Schedule& schedule_;
};

struct End {
  int stage = -1, action = 0, sequence = 0;
};

// Runs a schedule in any order that its messages and collectives allow, to find what each input
// depends on: a stage's action follows all earlier ones of that stage.
class Dependencies {
 public:
  Dependencies(const Schedule& schedule, std::vector<std::vector<ActionTransfers>>& plan)
      : schedule_(schedule), plan_(plan), next_(plan.size(), 0) {
    known_.assign(plan.size(), Counts(plan.size(), 0));
  }

  // Fills in `needs`. A schedule that cannot run keeps those of the actions that it reaches.
  void count() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t stage = 0; stage < plan_.size(); ++stage)
        while (next_[stage] < plan_[stage].size() && advance(stage)) moved = true;
    }
  }

 private:
  using Counts = std::vector<int>;  // by stage: so many of its first actions
  struct Joint {
    int calls = 0;
    Counts known;
  };

  const Action& action(size_t stage) const { return schedule_.stages[stage][next_[stage]]; }
  bool is_last(size_t stage) const { return stage + 1 == plan_.size(); }

  static void add(Counts& to, const Counts& from) {
    if (to.empty()) to.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
  }

  // What the action takes from a collective: the kind of the passes that give it, and their number.
  std::pair<Kind, int> joint_input(size_t stage) const {
    const Kind kind = action(stage).kind;
    const int all = static_cast<int>(plan_.size());
    if (!schedule_.vocab_parallel) return {kind, 0};
    if (kind == Kind::kHead) return {Kind::kForward, 1};
    if (kind == Kind::kLoss) return {Kind::kHead, all};
    const bool takes = is_last(stage) && (kind == Kind::kBackward || kind == Kind::kBackwardInput);
    return {Kind::kLoss, takes ? all : 0};
  }

  bool advance(size_t stage) {
    const size_t i = next_[stage];
    ActionTransfers& transfers = plan_[stage][i];
    const Transfer& receive = transfers.receive;
    const bool arrives = receive.any() && receive.peer != static_cast<int>(stage);
    const auto message = sent_.find({receive.peer, receive.peer_action});
    if (arrives && message == sent_.end()) return false;
    const auto [from, calls] = joint_input(stage);
    if (calls > 0 && joint_[{from, action(stage).microbatch}].calls < calls) return false;
    Counts& known = known_[stage];
    if (arrives) {
      transfers.needs = message->second[stage];
      add(known, message->second);
      sent_.erase(message);
    }
    if (calls > 0) add(known, joint_[{from, action(stage).microbatch}].known);
    known[stage] = static_cast<int>(i) + 1;
    if (const Transfer& send = transfers.send; send.any() && send.peer != static_cast<int>(stage))
      sent_[{static_cast<int>(stage), static_cast<int>(i)}] = known;
    const Kind kind = action(stage).kind;
    if (schedule_.vocab_parallel && (kind == Kind::kHead || kind == Kind::kLoss ||
                                     (kind == Kind::kForward && is_last(stage)))) {
      Joint& joint = joint_[{kind, action(stage).microbatch}];
      ++joint.calls;
      add(joint.known, known);
    }
    ++next_[stage];
    return true;
  }

  const Schedule& schedule_;
  std::vector<std::vector<ActionTransfers>>& plan_;
  std::vector<size_t> next_;                     // action, by stage
  std::vector<Counts> known_;                    // what the stages' results depend on so far
  std::map<std::pair<int, int>, Counts> sent_;   // by stage and action: not yet received
  std::map<std::pair<Kind, int>, Joint> joint_;  // by pass and micro-batch
};

}  // namespace

std::vector<std::vector<ActionTransfers>> plan_transfers(const Schedule& schedule) {
  const Crossings crossings(schedule);
  std::vector<std::vector<ActionTransfers>> plan(schedule.stages.size());
  // Users of each tensor; then producers, numbered per receiver; then both ends are joined.
  std::vector<End> used(crossings.size()), made(crossings.size());
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
    plan[static_cast<size_t>(stage)].resize(actions.size());
    for (size_t i = 0; i < actions.size(); ++i)
      if (const int64_t what = crossings.received(stage, actions[i]); what >= 0)
        used[static_cast<size_t>(what)] = {stage, static_cast<int>(i), 0};
  }
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
    std::vector<int> sent(schedule.stages.size(), 0);  // messages so far, by receiver
    for (size_t i = 0; i < actions.size(); ++i) {
      const int64_t what = crossings.sent(stage, actions[i]);
      if (what < 0) continue;
      const End& use = used[static_cast<size_t>(what)];
      MEGATRON_ASSERT(use.stage >= 0, "no action uses the result of ", to_string(actions[i]),
                      " on stage ", stage, " of the schedule ", schedule.name);
      const int sequence = sent[static_cast<size_t>(use.stage)]++;
      made[static_cast<size_t>(what)] = {stage, static_cast<int>(i), sequence};
      plan[static_cast<size_t>(stage)][i].send = {use.stage, sequence, use.action};
    }
  }
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
    for (size_t i = 0; i < actions.size(); ++i) {
      const int64_t what = crossings.received(stage, actions[i]);
      if (what < 0) continue;
      const End& make = made[static_cast<size_t>(what)];
      MEGATRON_ASSERT(make.stage >= 0, "no action produces the input of ", to_string(actions[i]),
                      " on stage ", stage, " of the schedule ", schedule.name);
      plan[static_cast<size_t>(stage)][i].receive = {make.stage, make.sequence, make.action};
      plan[static_cast<size_t>(stage)][i].needs = static_cast<int>(i);
    }
  }
  Dependencies(schedule, plan).count();
  return plan;
}

size_t early_receiver(const std::vector<ActionTransfers>& actions, int stage, size_t current) {
  const auto waits = [&](const Transfer& receive) {
    return receive.any() && receive.peer != stage;
  };
  size_t next = current + 1;
  while (next < actions.size() && !waits(actions[next].receive)) ++next;
  const bool early = next < actions.size() && actions[next].needs <= static_cast<int>(current);
  return early ? next : actions.size();
}

std::vector<std::vector<int>> hidden_calls(const Schedule& schedule, int stage, bool early) {
  const std::vector<Action>& actions = schedule.stages[static_cast<size_t>(stage)];
  std::vector<std::vector<int>> calls(actions.size());
  int forwards = 0;     // passes before the action
  bool called = false;  // the next micro-batch's call has been made
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind == Kind::kForward) ++forwards;
    if (actions[i].kind != Kind::kHead) continue;
    const int m = actions[i].microbatch;
    if (!called) calls[i].push_back(m);
    called = early && forwards > m + 1;
    if (called) calls[i].push_back(m + 1);
  }
  return calls;
}

std::vector<std::pair<int, int>> transfer_links(const Schedule& schedule) {
  std::set<std::pair<int, int>> links;
  for (int segment = 0; segment + 1 < schedule.num_segments(); ++segment) {
    const int from = schedule.place(segment).stage, to = schedule.place(segment + 1).stage;
    if (from == to) continue;
    links.insert({from, to});
    links.insert({to, from});
  }
  return {links.begin(), links.end()};
}

}  // namespace megatron
