// What each action of a schedule receives and sends. Derived from all ranks' lists, so that both
// ends of a link agree on the order of its messages without a word exchanged. Without libtorch.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// One end of a tensor's way from the action that makes it to the one that uses it.
struct Transfer {
  static constexpr int kNone = -1;
  int peer = kNone;     // the stage at the other end; this stage itself: handed over in memory
  int sequence = 0;     // place among the messages from sender to receiver, in the order of sending
  int peer_action = 0;  // index, in the peer's list, of the action at the other end
  bool any() const { return peer != kNone; }
  bool operator==(const Transfer&) const = default;
};

struct ActionTransfers {
  Transfer receive;  // forward: from the previous segment; B, I: from the next one
  Transfer send;
};

// By stage, by action. Throws InternalError when an action's input is made by nobody, or a result
// is used by nobody: the schedule is not whole.
std::vector<std::vector<ActionTransfers>> plan_transfers(const Schedule& schedule);

// The first action of `stage` from `from` on whose input comes from another stage; the number of
// actions when there is none.
size_t next_receiver(const std::vector<ActionTransfers>& actions, int stage, size_t from);

// With the vocabulary over the stages, calls of all stages join the passes: the last stage's F to H
// (hidden states), H to L (statistics of the logits), L to the last stage's B (gradient of the
// hidden states). Every stage makes the second and the third one right after its pass; the first
// one, by action, before it: the micro-batches. With `early` the call comes before H of the
// micro-batch before, unless an F that the hidden states need is still to come then.
std::vector<std::vector<int>> hidden_calls(const Schedule& schedule, int stage, bool early);

// The ordered pairs of different stages between which the placement of the schedule moves tensors,
// sorted.
std::vector<std::pair<int, int>> transfer_links(const Schedule& schedule);

}  // namespace megatron
