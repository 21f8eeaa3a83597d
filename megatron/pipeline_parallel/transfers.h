// What each action of a schedule receives and sends. Derived from all ranks' lists, so that both
// ends of a link agree on the order of its messages without communicating. Without libtorch.
#pragma once

#include <utility>
#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// One end of the transfer of a tensor from the action that produces it to the one that uses it.
struct Transfer {
  static constexpr int kNone = -1;
  int peer = kNone;     // stage at the other end; this stage itself: passed in memory
  int sequence = 0;     // index among the messages from sender to receiver
  int peer_action = 0;  // index, in the peer's list, of the action at the other end
  bool any() const { return peer != kNone; }
  bool operator==(const Transfer&) const = default;
};

struct ActionTransfers {
  Transfer receive;  // forward: from the previous segment; B, I: from the next one
  Transfer send;
  // Of this stage's actions, so many from the first on must have run before the input can be made.
  int needs = 0;
};

// Indexed by stage and action. Throws InternalError if no action produces an action's input, or no
// action uses a result: the schedule is incomplete.
std::vector<std::vector<ActionTransfers>> plan_transfers(const Schedule& schedule);

// The action whose receive may be posted before action `current` computes: the next one whose input
// comes from another stage. The number of actions if there is none, or if its input needs what
// `current` computes: on a GPU a posted receive is a running kernel, and whatever waits for all
// kernels there (a kernel's code that is loaded at its first use, an allocator that frees) would
// wait for its own result. Such a message could not arrive any earlier.
size_t early_receiver(const std::vector<ActionTransfers>& actions, int stage, size_t current);

// With the vocabulary split over the stages, collectives over all stages connect the passes: the
// last stage's F to H (broadcast of the hidden states), H to L (all-gather of the statistics), L to
// the last stage's B (all-reduce of the gradient of the hidden states). Every stage starts the
// second and third right after its pass, and the first before an action: the result lists its
// micro-batches, by action. With `early` it comes before the preceding micro-batch's H, unless an F
// that the hidden states need still follows then.
std::vector<std::vector<int>> hidden_calls(const Schedule& schedule, int stage, bool early);

// The ordered pairs of different stages between which the schedule's placement sends tensors,
// sorted.
std::vector<std::pair<int, int>> transfer_links(const Schedule& schedule);

}  // namespace megatron
