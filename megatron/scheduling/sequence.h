// One choice of a request, as the scheduler knows it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "megatron/scheduling/grammar_follower.h"
#include "megatron/scheduling/prefix_index.h"
#include "megatron/scheduling/request.h"
#include "megatron/scheduling/state.h"
#include "megatron/scheduling/step_plan.h"

namespace megatron {

// What the choices of one request have in common.
struct SequenceGroup {
  RequestSpec spec;
  // The prompt's blocks of choice 0 can be found, or will not be; the other choices may start.
  bool prompt_is_shared = false;
};

struct Sequence {
  RequestId request{};
  int32_t choice = 0;
  std::shared_ptr<SequenceGroup> group;
  const RequestSpec& spec() const { return group->spec; }

  RequestState state = RequestState::kQueued;
  uint64_t arrival = 0;  // rank in the order of submission
  int64_t submitted_ns = 0;
  int64_t deadline_ns = INT64_MAX;

  int64_t given = 0;         // given rows, positions in front of `ids`
  int64_t prompt = 0;        // positions of the prompt
  std::vector<int32_t> ids;  // of the prompt, then those drawn and read
  int64_t draws = 0;         // planned; those that were not read included
  int64_t scored = 0;        // the first position whose log-probability is wanted and not planned
  std::optional<GrammarFollower> grammar;  // has read the tokens of `ids` that were drawn
  int32_t most_drafts = 0;                 // of its next step that has drafts
  bool unread_drafts = false;              // the step in flight that draws for it has some
  int64_t drafted = 0, accepted = 0;       // drafts that were read; of those, that stand

  // While it runs
  int32_t slot = -1;
  int64_t residency = 0;  // counts the times that it got a slot
  bool long_rope = false;
  std::vector<int32_t> blocks;  // of positions 0 on; kNoBlock: behind the window
  int32_t dropped = 0;          // leading kNoBlock
  // Blocks that plans have told the ranks of, and how many of them as kNoBlock.
  int32_t announced = 0, announced_dropped = 0;
  int32_t stood = 0;      // the last of `computed`: drafts of its last part
  int64_t computed = 0;   // positions that are in the cache after the last planned step
  int64_t ended = 0;      // after the last step that has ended
  int64_t last_step = 0;  // the last planned one that reads or writes its blocks
  int64_t last_part = 0;  // the last planned one that computes rows of it
  int64_t last_draw = 0;  // the last planned one that draws
  int32_t published = 0;  // leading blocks that are in the prefix index
  PrefixNode node;        // of the last of these
  bool publishes = false;

  // While it is preempted and swapped out
  std::vector<int32_t> host_blocks;
  int32_t host_dropped = 0;  // leading kNoBlock in front of host_blocks
  int32_t host_state = -1;
  bool swapped = false;

  int32_t preemptions = 0;
  int64_t cached_tokens = -1;  // read from the prefix cache when it was first scheduled
  int64_t scheduled_ns = -1;   // first

  int64_t known() const { return given + static_cast<int64_t>(ids.size()); }
  int64_t outputs() const { return known() - prompt; }  // read
  int64_t unread() const { return draws - outputs(); }  // drawn in steps in flight
  int64_t length() const { return prompt + draws; }     // positions that the device knows
  int32_t id_at(int64_t position) const { return ids[static_cast<size_t>(position - given)]; }
  bool is_running() const {
    return state == RequestState::kPrefill || state == RequestState::kDecode;
  }
  bool is_waiting() const {
    return state == RequestState::kQueued || state == RequestState::kPreempted;
  }
};

// How its tokens are drawn, with what is known of it so far.
SlotStart slot_start(const Sequence& sequence);

}  // namespace megatron
