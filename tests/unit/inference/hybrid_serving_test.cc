// The engine over models with states: requests that come, go and make room for each other at random
// get the tokens that they get alone.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/generator.h"
#include "megatron/scheduling/clock.h"
#include "megatron/scheduling/prompt_lookup.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

struct Asked {
  RequestSpec spec;
  std::vector<int32_t> tokens;
  std::optional<FinishReason> reason;
};

class RandomRequests {
 public:
  RandomRequests(Served& served, const RunnerOptions& runner, uint32_t seed)
      : served_(served), random_(seed), runner_(*served.model, *served.weights, runner) {
    EngineOptions options;
    options.scheduler.max_step_tokens = 5 + seed % 9;
    if (runner.keeping.drafts > 0) {
      options.scheduler.max_drafts = static_cast<int32_t>(runner.keeping.drafts);
      options.scheduler.draft_source = std::make_shared<PromptLookup>(1, 4);
    }
    options.check_invariants = true;
    engine_.emplace(runner_, nullptr, nullptr, clock_, options);
  }

  void run(int requests) {
    int submitted = 0;
    for (int turn = 0; submitted < requests || open_ > 0; ++turn) {
      ASSERT_LT(turn, 5000) << "requests do not end";
      if (submitted < requests && chance(3)) submitted += submit();
      if (chance(25) && !asked_.empty())
        engine_->cancel(std::next(asked_.begin(), below(asked_.size()))->first);
      if (chance(20)) suspend();
      step();
    }
    for (const auto& [id, asked] : asked_) check(asked);
    stats_ = engine_->stats();
    EXPECT_EQ(stats_.blocks_held, 0);
    EXPECT_EQ(stats_.queued + stats_.running + stats_.preempted, 0);
    EXPECT_EQ(stats_.cached_tokens, 0u) << "states are of no prefix";
  }
  const EngineStats& stats() const { return stats_; }
  int64_t canceled() const { return canceled_; }
  int64_t whole() const { return whole_; }

 private:
  uint32_t below(size_t n) { return random_() % static_cast<uint32_t>(n); }
  bool chance(size_t n) { return below(n) == 0; }

  int submit() {
    RequestSpec spec;
    spec.prompt = random_ids(random_, 1 + below(14));
    spec.stop.max_tokens = 1 + below(16);
    spec.sampling.temperature = 0.0;
    const Admission admission = engine_->submit(spec);
    if (!admission.id) return 0;
    asked_[*admission.id].spec = spec;
    ++open_;
    return 1;
  }
  // The cache and the weights leave the device and come back.
  void suspend() {
    if (engine_->stats().state != EngineState::kRunning) return;
    command(PauseCommand{});
    command(SuspendCommand{chance(2) ? MemoryLevel::kOffload : MemoryLevel::kDrop,
                           MemoryLevel::kOffload});
    command(ResumeCommand{});
  }
  void command(EngineCommand command) {
    const Ticket ticket = engine_->command(std::move(command), 10'000'000'000);
    while (!ticket.outcome()) step();
    EXPECT_EQ(ticket.outcome()->message, "");
  }
  void step() {
    engine_->step(1'000'000);
    for (Event& event : engine_->take_events()) {
      Asked& asked = asked_.at(event.request);
      for (const GeneratedToken& token : event.tokens) asked.tokens.push_back(token.id);
      if (!event.finish) continue;
      asked.reason = event.finish->reason;
      --open_;
    }
  }
  // All its tokens, or those before it was cancelled.
  void check(const Asked& asked) {
    ASSERT_TRUE(asked.reason.has_value());
    const bool canceled = !is_complete(*asked.reason);
    (canceled ? canceled_ : whole_) += 1;
    if (!canceled) {
      EXPECT_EQ(std::ssize(asked.tokens), asked.spec.stop.max_tokens);
    }
    std::vector<int32_t> ids = asked.spec.prompt;
    for (const int32_t token : asked.tokens) {
      EXPECT_EQ(token,
                full_logits(*served_.model, ids)[std::ssize(ids) - 1].argmax().item<int64_t>());
      ids.push_back(token);
    }
  }

  Served& served_;
  std::mt19937 random_;
  ModelRunner runner_;
  MonotonicClock clock_;
  std::optional<Engine> engine_;
  std::map<RequestId, Asked> asked_;
  EngineStats stats_;
  int64_t open_ = 0, canceled_ = 0, whole_ = 0;
};

TEST(HybridServing, RequestsGetWhatTheyGetAlone) {
  const ParallelGroups one;
  uint64_t preemptions = 0, swapped = 0;
  int64_t canceled = 0, whole = 0, drafts = 0, accepted = 0;
  for (const char* pattern : {"M-", "GM*-"}) {
    const ModelConfig config = hybrid_served_model(pattern);
    Served served(Served::make(config, one));
    for (uint32_t seed = 0; seed < 6; ++seed) {
      RunnerOptions options = small_runner(12);  // too few blocks for all slots
      options.max_positions = 32;
      options.host_blocks = seed % 2 == 0 ? 24 : 0;  // else computed again
      options.host_states = seed % 2 == 0 ? 3 : 0;
      options.keeping.replays_chunks = seed == 5;
      options.keeping.drafts = seed < 2 ? 0 : 2 + seed;
      RandomRequests requests(served, options, seed);
      requests.run(10);
      preemptions += requests.stats().preemptions;
      swapped += requests.stats().swapped_blocks;
      canceled += requests.canceled();
      whole += requests.whole();
      drafts += static_cast<int64_t>(requests.stats().drafts);
      accepted += static_cast<int64_t>(requests.stats().accepted_drafts);
    }
  }
  EXPECT_GT(preemptions, 10u);
  EXPECT_GT(swapped, 4u);
  EXPECT_GT(canceled, 4);
  EXPECT_GT(whole, 60);
  EXPECT_GT(accepted, 10);
  EXPECT_GT(drafts, accepted * 5 / 4);
}

}  // namespace
}  // namespace megatron
