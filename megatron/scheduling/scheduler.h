// Decides what each step computes: which sequences run, which tokens of theirs, in which blocks.
//
// Decodes come first, then chunks of prompts, then sequences that wait, each in the order of
// priority and arrival; a sequence that waits long moves up. A sequence that needs a block which no
// other gives up waits; one behind it may be preempted for it. The first in the order can always
// take what it needs, and what was admitted fits into the whole cache, so that everything ends.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/scheduling/cache_blocks.h"
#include "megatron/scheduling/draft_source.h"
#include "megatron/scheduling/runner_facts.h"
#include "megatron/scheduling/sequence.h"
#include "megatron/scheduling/step_budget.h"
#include "megatron/scheduling/step_plan.h"

namespace megatron {

struct SchedulerConfig {
  int64_t max_step_tokens = 2048;      // at least the slots
  int64_t max_gap_ns = 0;              // goal for the duration of a step; 0: none
  int64_t max_waiting = 1024;          // sequences that have not been scheduled yet
  int32_t reserve_blocks = 0;          // that admission leaves to those that run
  int64_t ageing_ns = 10'000'000'000;  // waiting so long is worth one level of priority
  int32_t max_preemptions = 3;  // afterwards a sequence is chosen only when all others were, too
  bool share_prefixes = true;
  double max_idle_share = 1.0;  // of the cache, for idle prefixes of one salt
  // Swapping a block out and in costs as much time as computing so many positions; a sequence is
  // swapped where that is less, and computed again otherwise.
  double swap_block_tokens = 2.0;
  // Guesses of next tokens, up to `max_drafts` of a sequence in a step; null: none.
  std::shared_ptr<DraftSource> draft_source = nullptr;
  int32_t max_drafts = 0;
  bool poison_freed_blocks = false;  // tests: plans ask for NaN in blocks that became free
};

// What a sequence that is not planned waits for.
enum class Resource : uint8_t { kNothing, kSlot, kBlocks, kBudget, kPrompt, kToken, kPause };
std::string_view name(Resource resource);

// What a step gave for one live sequence.
struct StepOutput {
  std::shared_ptr<Sequence> sequence;
  // Tokens that stand. Their ids were appended to the sequence's, but that of the last one if it is
  // not finite.
  std::vector<DrawnToken> draws;
  std::vector<PositionLogProbabilities> scores;
  bool prompt_is_done = false;  // all scores that were wanted have come
};

// Not thread safe. Times are of one clock, which the caller reads.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig& config, const RunnerFacts& facts,
            PrefixIndex::Hash hash = hash_prefix);

  // Queues a request that check_request() has passed, or refuses it: the queue is full.
  std::optional<Refusal> submit(RequestId id, RequestSpec spec, int64_t now_ns);

  // Plans the next step; null: nothing can be done before a result is read, or at all.
  std::optional<StepPlan> plan(int64_t now_ns);
  // Takes the result of the oldest step planned and not read; `duration_ns` of the step, 0:
  // unknown.
  std::vector<StepOutput> read(const StepResult& result, int64_t duration_ns);
  int64_t steps_in_flight() const { return static_cast<int64_t>(in_flight_.size()); }

  // The text ends before the last `count` of the tokens that read() appended last.
  void take_back(Sequence& sequence, int64_t count);
  // Ends a sequence; its blocks are freed when no step in flight uses them.
  void finish(Sequence& sequence, RequestEvent event);

  // Sequences that have not ended, in the order of arrival; those of one request.
  std::vector<std::shared_ptr<Sequence>> sequences() const;
  std::vector<std::shared_ptr<Sequence>> sequences(RequestId id) const;
  std::shared_ptr<Sequence> sequence(RequestId id, int32_t choice) const;  // has not ended
  std::vector<std::shared_ptr<Sequence>> expired(int64_t now_ns) const;
  bool empty() const { return sequences_.empty(); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_in_state(RequestState state) const;
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  // Whether a sequence that has been scheduled has not ended.
  bool has_started() const;
  // False: sequences that have not been scheduled yet wait.
  void set_starts_new(bool starts) { starts_new_ = starts; }

  // Between two steps, none in flight: what the cache holds is lost, or was computed by weights
  // that are not used any more.
  void recompute_all();
  // Keys of running sequences stay; no prefix of theirs is shared from now on.
  void forget_prefixes();
  void set_weights_version(int64_t version) { facts_.weights_version = version; }

  const CacheBlocks& blocks() const { return blocks_; }
  const RunnerFacts& facts() const { return facts_; }
  int64_t last_step() const { return last_step_; }
  uint64_t num_preemptions() const { return preemptions_; }
  uint64_t num_swapped_blocks() const { return swapped_blocks_; }
  uint64_t num_step_tokens() const { return step_tokens_; }
  uint64_t num_drafts() const { return drafts_; }  // that were read
  uint64_t num_accepted_drafts() const { return accepted_drafts_; }
  // What the first waiting sequence waited for in the last plan.
  Resource waits_for() const { return waits_for_; }

  // Throws InternalError if counts of blocks, lists and states contradict each other.
  void check_invariants() const;

 private:
  struct Part {
    std::shared_ptr<Sequence> sequence;
    PlanPart part;
    std::vector<int32_t> drafts = {};
    std::vector<uint32_t> masks = {};  // after each draft, of a sequence with a grammar
  };
  struct Draft;  // a step that is being planned
  struct InFlight {
    int64_t step = 0;
    int64_t rows = 0, context = 0;
    struct Entry {
      std::shared_ptr<Sequence> sequence;
      int64_t residency = 0, end = 0;  // positions that it has afterwards, without drafts
      int32_t scores = 0;
      bool draws = false, prompt_ends = false;
      std::vector<int32_t> drafts;
      size_t num_draws() const { return draws ? 1 + drafts.size() : 0; }
    };
    std::vector<Entry> entries;
  };
  using List = std::vector<std::shared_ptr<Sequence>>;

  List in_order(List list, int64_t now_ns) const;
  std::pair<int64_t, uint64_t> order(const Sequence& sequence, int64_t now_ns) const;
  static void move(Sequence& sequence, RequestEvent event, RequestState next);

  void plan_decodes(Draft& draft);
  void plan_drafts(Draft& draft);
  int64_t wanted_drafts(const Sequence& sequence) const;
  void add_drafts(Draft& draft, Part& part, std::vector<int32_t> drafts);
  void plan_chunks(Draft& draft);
  void admit(Draft& draft);
  bool plan_chunk(Draft& draft, const std::shared_ptr<Sequence>& sequence);
  // Of the next rows of a prompt at most `rows`, such that they attend to none behind them; if
  // there are none, and at most `most` are needed, so many; else 0.
  static int64_t undivided(const Sequence& sequence, int64_t rows, int64_t most);
  void add_part(Draft& draft, const std::shared_ptr<Sequence>& sequence, int64_t rows);
  static void announce_blocks(StepPlan& plan, Sequence& sequence);
  StepPlan finish_plan(Draft& draft);

  bool can_draw(const Sequence& sequence) const;
  bool crosses_rope_border(const Sequence& sequence) const;
  void drop_behind_window(Sequence& sequence);
  // Appends up to `count` blocks, by preempting others if need be; the number appended.
  int64_t take_blocks(Draft& draft, Sequence& sequence, int64_t count);
  std::shared_ptr<Sequence> choose_victim(const Draft& draft, const Sequence& needing) const;
  void preempt(Draft* draft, Sequence& sequence, bool may_swap);
  bool swap_out(Draft& draft, Sequence& sequence);
  // Ends its time on the device: slot and blocks.
  void leave_device(Sequence& sequence, int64_t after);

  Resource try_admit(Draft& draft, const std::shared_ptr<Sequence>& sequence);
  void start(Draft& draft, Sequence& sequence);
  void start_from_prefix(Draft& draft, Sequence& sequence, const PrefixHit& hit);
  void swap_in(Draft& draft, Sequence& sequence);
  PrefixHit find_prefix(const Sequence& sequence) const;
  PrefixIdentity identity(const Sequence& sequence) const;
  int64_t blocks_for(int64_t positions) const;
  int64_t blocks_promised() const;

  void drop_host_copy(Sequence& sequence);
  void forget_computed(Sequence& sequence);
  void free_ended_host_copies();
  void publish(Sequence& sequence, bool tail);
  StepOutput read_entry(const InFlight::Entry& entry, const StepResult& result, size_t& draw,
                        size_t& score);
  std::vector<DrawnToken> take_draws(const InFlight::Entry& entry,
                                     std::span<const DrawnToken> given);

  SchedulerConfig config_;
  RunnerFacts facts_;
  CacheBlocks blocks_;
  BlockPool host_blocks_;
  StepBudget budget_;
  bool shares_;  // prefixes
  bool starts_new_ = true;

  std::map<std::pair<RequestId, int32_t>, std::shared_ptr<Sequence>> sequences_;
  List running_, waiting_;
  std::vector<int32_t> free_slots_, free_host_states_;
  std::vector<int32_t> released_slots_;  // not announced yet
  // Host blocks and states that a step in flight reads.
  std::vector<std::pair<int64_t, int32_t>> pending_host_blocks_, pending_host_states_;
  std::deque<InFlight> in_flight_;
  int64_t last_step_ = 0, ended_step_ = 0;
  uint64_t last_hash_ = 0;
  uint64_t arrivals_ = 0, preemptions_ = 0, swapped_blocks_ = 0, step_tokens_ = 0;
  uint64_t drafts_ = 0, accepted_drafts_ = 0;
  Resource waits_for_ = Resource::kNothing;
};

}  // namespace megatron
