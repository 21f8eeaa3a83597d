// What the ranks of a model do in one step, as plain integers. Rank 0 makes it; every rank applies
// it to its own cache, states and sampling parameters, which are equal on all ranks because the
// plans are.
//
// A slot is a number below the most sequences that run at a time. A sequence has the same slot from
// its SlotStart to its release; the slot names its state of fixed size on the device, its sampling
// parameters, its last sampled token, and its list of blocks.
//
// Order within a step: swap_out of blocks and states, poison, releases, starts, block changes,
// swap_in of blocks and states, copies, the forward over all parts, scores, draws. A step without
// parts may still swap.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/scheduling/request.h"

namespace megatron {

// Tokens of StepPlan::tokens that are no ids.
constexpr int32_t kLastSampled = -1;  // the token that was last drawn for the part's slot
constexpr int32_t kGivenRow = -2;     // the next of the given rows: row `position` of them

// An entry of a list of blocks that is not held any more: behind the window of every layer.
constexpr int32_t kNoBlock = -1;

// A sequence gets a slot: it runs for the first time, or again after it was preempted.
struct SlotStart {
  int32_t slot = 0;
  RequestId request{};
  int32_t choice = 0;
  int32_t adapter = -1;
  int64_t prompt_length = 0;  // positions of the prompt, given rows included
  // Ids that are known: those of the prompt, then those generated so far. Penalties count them.
  std::vector<int32_t> ids;
  std::shared_ptr<const GivenRows> rows;
  std::shared_ptr<const StateInput> state_input;
  SamplingParameters sampling;
  LogProbabilityWishes log_probabilities;
  // No id of `ends` is drawn before the position prompt_length + min_tokens.
  int64_t min_tokens = 0;
  std::vector<int32_t> ends;
};

// Changes of a slot's list of blocks, in this order.
struct BlockChange {
  int32_t slot = 0;
  int32_t leading_dropped = 0;  // so many leading entries that are blocks become kNoBlock
  std::vector<int32_t> appended;
};

// Consecutive positions of one sequence. All of its earlier positions are in the cache.
struct PlanPart {
  int32_t slot = 0;
  int64_t first = 0;  // position of the first row
  int32_t count = 0;  // rows, at least 1
  // Positions of the sequence that were known when its keys began to be computed: those up to
  // `first + count` and, in a chunk of a prompt, the later ones. Longrope chooses by it.
  int64_t known = 0;
  // Rows whose next token's log-probability is wanted: [score_first, score_first + score_count)
  // within the part. The next token of the part's row i is the one at position first + i + 1, in
  // the order of StepPlan::targets.
  int32_t score_first = 0, score_count = 0;
  bool draws = false;   // a token is drawn from the last row's logits, for position first + count
  bool masked = false;  // only ids of a mask of StepPlan::masks are drawn
  // The last so many rows are drafts, ids that the text may have there: a token is drawn from each
  // of the last 1 + drafts rows, and stands if all drafts before it equal what was drawn for their
  // places. Rows of drafts that do not are written again. Only a part that draws has them.
  int32_t drafts = 0;
  // So many positions before `first` were drafts of the slot's part before, and stand. A state of
  // fixed size has not read them.
  int32_t stood = 0;
  int32_t num_draws() const { return draws ? 1 + drafts : 0; }

  bool operator==(const PlanPart&) const = default;
};

struct BlockCopy {
  int32_t from = 0, to = 0;  // within the device's pool
  int32_t positions = 0;     // leading positions that count
  bool operator==(const BlockCopy&) const = default;
};

// Between a device block and a host block, or a slot's state and a host slot.
struct Swap {
  int32_t device = 0, host = 0;
  bool operator==(const Swap&) const = default;
};

struct StepPlan {
  int64_t step = 0;            // from 1, without gaps
  uint64_t previous_hash = 0;  // hash() of the plan before, 0 for the first
  int64_t weights_version = 0;

  std::vector<int32_t> releases;                    // slots whose sequences left
  std::vector<Swap> swap_out, swap_in;              // blocks
  std::vector<Swap> state_swap_out, state_swap_in;  // states of slots
  std::vector<BlockCopy> copies;
  std::vector<int32_t> poison;  // blocks to be filled with NaN; tests alone
  std::vector<SlotStart> starts;
  std::vector<BlockChange> blocks;

  std::vector<PlanPart> parts;   // those of one row first
  std::vector<int32_t> tokens;   // of all parts' rows in order: an id, kLastSampled or kGivenRow
  std::vector<int32_t> targets;  // of all parts' scored rows in order: the next token
  // Of the draws of parts that are masked, in order, token_mask_words() of the vocabulary each: the
  // ids that may be drawn.
  std::vector<uint32_t> masks;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_draws() const;
};

// Version of the serialised form; ranks of other versions are refused by name when they meet.
constexpr int32_t kStepPlanVersion = 5;

// Little-endian bytes; equal plans give equal bytes.
std::string serialise(const StepPlan& plan);
// Throws Error for bytes that serialise() of this version does not write.
StepPlan parse_step_plan(std::string_view bytes);
// Of the serialised plan, never 0.
uint64_t hash(const StepPlan& plan);

// Lists of blocks by slot, as the plans so far make them.
class BlockTables {
 public:
  explicit BlockTables(int32_t slots) : tables_(static_cast<size_t>(slots)) {}
  // Releases, starts and block changes of a plan. Throws InternalError if they do not fit.
  void apply(const StepPlan& plan);
  // Of positions 0 on; leading ones may be kNoBlock.
  std::span<const int32_t> blocks(int32_t slot) const {
    return tables_.at(static_cast<size_t>(slot));
  }

 private:
  std::vector<std::vector<int32_t>> tables_;
};

// What a step gives, read on the host of rank 0.
struct DrawnToken {
  int32_t slot = 0;
  int32_t id = 0;
  bool finite = true;  // false: the logits were not, and id means nothing
  std::optional<PositionLogProbabilities> log_probabilities;
};
struct StepResult {
  int64_t step = 0;
  std::vector<DrawnToken> draws;  // of the parts with `draws`, in order: num_draws() of each
  std::vector<PositionLogProbabilities> scores;  // of all scored rows, in order
};

}  // namespace megatron
