// Drafts by a second, smaller model of the target's vocabulary. It draws them with the noise that
// the target will draw with, so that they are equal as often as the two distributions agree, at any
// temperature. It runs on the first rank alone. Without libtorch, so that it is tested with fakes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "megatron/inference/step_runner.h"
#include "megatron/scheduling/cache_blocks.h"
#include "megatron/scheduling/draft_source.h"

namespace megatron {

struct DraftModelOptions {
  int64_t vocab_size = 0;          // of the target: ids from there on are no drafts
  int64_t max_step_tokens = 2048;  // of a step of the draft model; at least its slots
  bool share_prefixes = true;
  int64_t step_timeout_ns = 60'000'000'000;
  bool poison_freed_blocks = false;  // tests: plans ask for NaN in blocks that became free
};

// Keeps a cache of its own over the texts that it is asked about. What of them it has not read is
// read first, in chunks; a text gets drafts when all of it is read. Blocks that lack are taken from
// the texts that were not asked about for longest, which are read again.
//
// Texts with given rows get no drafts, nor do those with ids that the draft model does not know.
class DraftModel final : public DraftSource {
 public:
  // `runner`: of one rank, of a model without states; with as many slots as texts are asked about
  // at a time. It outlives this. Throws Error for other models.
  DraftModel(StepRunner& runner, const DraftModelOptions& options);

  // Throws what the runner throws, and Error for a step that does not end.
  void propose(std::span<DraftQuery> queries) override;
  void forget(const Sequence& sequence) override;
  // The runner's cache has lost what it held.
  void forget_cache();

  bool empty() const { return texts_.empty() && blocks_.pool().num_held() == 0; }
  uint64_t rows() const { return rows_; }  // computed so far

 private:
  struct Text {
    std::vector<int32_t> cached;  // ids whose keys are in `blocks`
    int64_t certain = 0;          // so many of them are the text's; those behind are drafts
    std::vector<int32_t> blocks;
    int32_t published = 0;  // leading blocks that are in the prefix index
    PrefixNode node;        // of the last of these
    bool publishes = false;
    bool long_rope = false;
    int64_t known_ids = 0;    // so many ids of the text were compared with the vocabulary
    bool is_strange = false;  // one of them is not in it
    uint64_t asked = 0;       // the last call that asked for it
  };
  // A text in one call.
  struct Asked {
    DraftQuery* query = nullptr;
    Text* text = nullptr;
    int64_t most = 0;  // drafts
    int32_t slot = 0;
    int64_t rows = 0;                 // of the text, in the first step
    bool drafts = false;              // that step reads the rest of it
    bool ended = false;               // nothing is drawn behind the last draft
    std::vector<uint32_t> mask = {};  // of the next draft, of a text with a grammar

    int64_t length() const { return std::ssize(query->sequence->ids); }
    int64_t unread() const { return length() - std::ssize(text->cached); }
  };
  using Drawing = std::vector<Asked*>;  // by draw of a step

  bool begin(Asked& asked);
  void keep_what_stands(Asked& asked) const;
  void start_from_prefix(Text& text, const Sequence& sequence) const;
  bool take_blocks(Text& text, int64_t positions);
  bool evict_one();
  void drop(Text& text);
  void publish(Asked& asked);
  PrefixIdentity identity(const Sequence& sequence, const Text& text) const;

  std::vector<Asked> choose(std::span<DraftQuery> queries);
  Drawing read_texts(std::vector<Asked>& asked);
  Drawing continue_drafts(Drawing drawing, int64_t drafted);
  void next_mask(Asked& asked) const;
  PlanPart part_of(const Asked& asked, int64_t first, int64_t rows) const;
  static void add_mask(StepPlan& plan, PlanPart& part, const Asked& asked);
  void launch(StepPlan plan);
  void take(const Drawing& drawing);

  StepRunner& runner_;
  const DraftModelOptions options_;
  mutable CacheBlocks blocks_;
  std::map<std::pair<RequestId, int32_t>, Text> texts_;
  std::vector<int32_t> used_slots_;
  int64_t last_step_ = 0;
  uint64_t last_hash_ = 0, calls_ = 0, rows_ = 0;
};

// The target's runner on the first rank: the draft model is suspended and comes back with it.
// Others than the target's weights are not exchanged.
class DraftedRunner final : public StepRunner {
 public:
  // All of them outlive this.
  DraftedRunner(StepRunner& target, StepRunner& draft, DraftModel& drafts)
      : target_(target), draft_(draft), drafts_(drafts) {}

  const RunnerFacts& facts() const override { return target_.facts(); }
  void launch(const StepPlan& plan) override { target_.launch(plan); }
  std::optional<StepResult> take(int64_t wait_ns) override { return target_.take(wait_ns); }
  void begin(const RunnerTransition& transition) override;
  std::optional<std::string> poll(int64_t wait_ns) override;

 private:
  std::string transit_draft(const RunnerTransition& transition);

  StepRunner &target_, &draft_;
  DraftModel& drafts_;
  SuspendRunner levels_;                  // of the last suspension
  std::string failure_;                   // of the draft model
  std::optional<RunnerTransition> undo_;  // what takes back the draft model's part
};

}  // namespace megatron
