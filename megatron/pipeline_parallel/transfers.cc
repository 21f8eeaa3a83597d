#include "megatron/pipeline_parallel/transfers.h"

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
    }
  }
  return plan;
}

size_t next_receiver(const std::vector<ActionTransfers>& actions, int stage, size_t from) {
  const auto waits = [&](const Transfer& receive) {
    return receive.any() && receive.peer != stage;
  };
  while (from < actions.size() && !waits(actions[from].receive)) ++from;
  return from;
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
