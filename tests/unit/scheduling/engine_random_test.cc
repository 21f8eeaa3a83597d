// Random schedules of requests and commands: whatever meets whatever, each request gives what it
// gives alone, and nothing is left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "engine_harness.h"
#include "fake_drafts.h"
#include "megatron/inference/speculation/draft_model.h"
#include "toy_grammar.h"

namespace megatron {
namespace {

using Kind = CommandOutcome::Kind;

int count_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

class RandomSchedule {
 public:
  RandomSchedule(uint32_t seed, const Tokenizer* tokenizer)
      : random_(seed),
        model_(draw_model()),
        run_(model_, draw_options(), ranks(), tokenizer, 0,
             [this](StepRunner& runner) -> StepRunner& {
               if (!draft_model_) return runner;
               return drafted_.emplace(runner, *draft_runner_, *draft_model_);
             }) {
    has_text_ = tokenizer != nullptr;
  }

  void execute() {
    const int requests = below(12) + 1;
    for (int turn = 0; submitted_ < requests || run_.open > 0; ++turn) {
      ASSERT_LT(turn, 4000) << "requests do not end";
      if (submitted_ < requests && chance(3)) submit();
      if (chance(40) && !run_.specs.empty())
        run_.engine->cancel(RequestId{static_cast<uint64_t>(1 + below(submitted_))});
      if (chance(30)) command();
      ASSERT_TRUE(run_.tick(below(3) * kMillisecond)) << run_.failure;
    }
    if (run_.state() == EngineState::kSuspended || run_.state() == EngineState::kPaused)
      run_.command(ResumeCommand{});
    run_.ticks(4);
    run_.check_outputs();
    run_.check_empty();
    EXPECT_TRUE(!drafts_ || drafts_->empty()) << "drafts of requests that have ended";
    EXPECT_TRUE(!draft_model_ || draft_model_->empty()) << "texts of requests that have ended";
  }
  const EngineHarness& run() const { return run_; }
  // 0: lists; 1: a model like the target; 2: one that does not know the target's state.
  int drafting() const { return draft_model_ == nullptr ? 0 : model_.facts.owns_state ? 2 : 1; }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  bool chance(int n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<int>(values.size())));
  }

  FakeOptions draw_model() {
    FakeOptions model;
    RunnerFacts& facts = model.facts;
    facts.vocab_size = 250;
    facts.block_size = 1 + below(6);
    facts.max_positions = 48;
    const auto whole = static_cast<int32_t>((48 + facts.block_size - 1) / facts.block_size);
    facts.device_blocks = whole + below(2 * whole);
    facts.slots = 1 + below(6);
    facts.window = chance(4) ? 1 + below(20) : 0;
    facts.rope_border = chance(5) ? 5 + below(30) : 0;
    facts.owns_state = chance(4);
    facts.state_drafts = 6;
    facts.takes_state_input = facts.owns_state && chance(2);
    facts.hidden_size = chance(3) ? 2 : 0;
    facts.num_adapters = below(3);
    facts.host_blocks = chance(2) ? below(2 * whole) : 0;
    facts.host_states = below(3);
    facts.draw_latency = chance(3) ? 2 + below(2) : 1;
    facts.launch_waits = chance(2);
    facts.weights_version = 1;
    model.keys_depend_on_weights = chance(2);
    return model;
  }

  EngineOptions draw_options() {
    EngineOptions options;
    SchedulerConfig& config = options.scheduler;
    config.max_step_tokens = 1 + below(20);
    config.max_gap_ns = chance(4) ? 2 * kMillisecond : 0;
    config.reserve_blocks = below(3);
    config.ageing_ns = one_of({kMillisecond, 100 * kMillisecond, 10 * kSecond});
    config.max_preemptions = 1 + below(3);
    config.share_prefixes = !chance(5);
    config.max_idle_share = chance(3) ? 0.3 : 1.0;
    config.swap_block_tokens = one_of({0.1, 2.0});
    if (chance(2)) {
      config.max_drafts = 1 + below(6);
      if (chance(2)) {
        drafts_ =
            std::make_shared<FakeDrafts>(model_, random_(), 1 + static_cast<uint32_t>(below(8)));
        config.draft_source = drafts_;
      } else {
        make_draft_model();
        config.draft_source = draft_model_;
      }
    }
    return options;
  }
  // The target's twin, or one that is wrong beyond a border, with a cache of any size.
  void make_draft_model() {
    FakeOptions twin = model_;
    RunnerFacts& facts = twin.facts;
    facts.owns_state = facts.takes_state_input = false;
    facts.draw_latency = 1;
    facts.hidden_size = facts.num_adapters = facts.host_blocks = 0;
    facts.block_size = 1 + below(6);
    facts.device_blocks = 1 + below(2 * model_.facts.device_blocks);
    if (chance(4)) facts.vocab_size = 200;
    if (chance(4)) facts.rope_border = 5 + below(30);
    if (chance(4)) facts.max_positions = 5 + below(43);
    draft_runner_.emplace(twin, clock_);
    DraftModelOptions options;
    options.vocab_size = model_.facts.vocab_size;
    options.max_step_tokens = facts.slots + below(20);
    options.share_prefixes = chance(2);
    options.poison_freed_blocks = true;
    draft_model_ = std::make_shared<DraftModel>(*draft_runner_, options);
  }
  int ranks() { return chance(3) ? 2 : 1; }

  void submit() {
    RequestSpec spec;
    // Prompts begin alike.
    const int stem = below(3), length = 1 + below(25);
    for (int i = 0; i < length; ++i)
      spec.prompt.push_back(i < 12 || chance(2) ? stem * 60 + i : below(250));
    const RunnerFacts& facts = model_.facts;
    if (facts.hidden_size > 0 && chance(2)) {
      GivenRows rows{1 + below(6), 2, {}};
      for (int64_t i = 0; i < rows.count * 2; ++i)
        rows.values.push_back(static_cast<float>(below(9)) / 4);
      spec.rows = std::make_shared<const GivenRows>(std::move(rows));
    }
    if (facts.takes_state_input)
      spec.state_input = std::make_shared<const StateInput>(StateInput{{below(50)}, {}, {}});
    StopConditions& stop = spec.stop;
    stop.max_tokens =
        1 + below(static_cast<int>(std::min<int64_t>(30, 48 - prompt_positions(spec))));
    stop.min_tokens = chance(4) ? below(static_cast<int>(stop.max_tokens) + 1) : 0;
    if (chance(2))
      for (int i = 0; i < 8; ++i) stop.end_tokens.push_back(below(250));
    if (chance(5)) stop.stop_tokens = {below(250), below(250)};
    if (has_text_ && chance(2)) stop.stop_texts = {"e", "ab", "\xc3"};
    if (!stop.stop_texts.empty()) stop.stop_texts.pop_back();
    stop.include_stop_text = chance(2);
    spec.sampling.temperature = chance(3) ? 0.0 : 1.0;
    spec.sampling.seed = random_();
    if (chance(4)) spec.sampling.repetition_penalty = 1.2;
    if (chance(30)) spec.sampling.forbidden = {kBreaksLogits};
    if (chance(4)) spec.log_probabilities.output_top = below(4);
    if (chance(4)) {
      spec.log_probabilities.prompt_top = below(3);
      spec.log_probabilities.prompt_from = below(length + 1);
      if (chance(2)) stop.max_tokens = stop.min_tokens = 0;
    }
    if (chance(5)) {
      spec.grammar = std::make_shared<const ToyGrammar>(static_cast<size_t>(below(20)));
      stop.min_tokens = 0;
      stop.end_tokens.push_back(kToyEnd);
    }
    spec.choices = chance(4) ? 1 + below(3) : 1;
    spec.priority = below(3) - 1;
    if (chance(15)) spec.timeout_ns = (1 + below(30)) * kMillisecond;
    spec.adapter = below(facts.num_adapters + 1) - 1;
    if (chance(4)) spec.cache_salt = "tenant";
    const Admission admission = run_.engine->submit(spec);
    if (!admission.id) {
      // It is suspended.
      EXPECT_EQ(admission.refusal->kind, Refusal::Kind::kUnavailable) << admission.refusal->message;
      run_.command(ResumeCommand{});
      return;
    }
    run_.accept(*admission.id, spec);
    ++submitted_;
  }

  void command() {
    const EngineState state = run_.state();
    const int what = below(6);
    if (state == EngineState::kSuspended || (state == EngineState::kPaused && what < 3)) {
      EXPECT_EQ(run_.command(ResumeCommand{}).kind, Kind::kDone);
    } else if (state == EngineState::kPaused && what < 5) {
      const MemoryLevel levels[] = {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop};
      EXPECT_EQ(run_.command(SuspendCommand{levels[below(3)], levels[below(3)]}).kind, Kind::kDone);
    } else if (what < 3) {
      const PauseMode mode = chance(4)   ? PauseMode::kAbort
                             : chance(2) ? PauseMode::kFinish
                                         : PauseMode::kKeep;
      const Kind kind = run_.command(PauseCommand{mode}, 10 * kMillisecond).kind;
      EXPECT_TRUE(kind == Kind::kDone || mode == PauseMode::kFinish);
    } else {
      // Keys of older weights are wrong where keys depend on them.
      EXPECT_EQ(run_.command(UpdateWeightsCommand{"new", ++version_,
                                                  model_.keys_depend_on_weights || chance(2)})
                    .kind,
                Kind::kDone);
    }
  }

  std::mt19937 random_;
  FakeOptions model_;
  std::shared_ptr<FakeDrafts> drafts_;
  FakeClock clock_;
  std::optional<FakeRunner> draft_runner_;
  std::shared_ptr<DraftModel> draft_model_;
  std::optional<DraftedRunner> drafted_;
  EngineHarness run_;
  bool has_text_ = false;
  int submitted_ = 0;
  int64_t version_ = 1;
};

TEST(EngineSchedules, RandomOnesGiveWhatEachRequestGivesAlone) {
  const auto tokenizer = byte_tokenizer();
  const int count = count_from("MEGATRON_RANDOM_SCHEDULES", 5000);
  uint64_t drafts[3] = {}, accepted[3] = {};
  for (int seed = 0; seed < count; ++seed) {
    SCOPED_TRACE(cat("seed ", seed));
    RandomSchedule schedule(static_cast<uint32_t>(seed), seed % 2 == 0 ? tokenizer.get() : nullptr);
    schedule.execute();
    if (testing::Test::HasFailure()) return;
    const EngineStats stats = schedule.run().engine->stats();
    drafts[schedule.drafting()] += stats.drafts;
    accepted[schedule.drafting()] += stats.accepted_drafts;
  }
  if (count < 1000) return;
  EXPECT_GT(drafts[2], 0U);
  for (const int kind : {0, 1}) {
    EXPECT_GT(drafts[kind], 3U * static_cast<uint64_t>(count)) << kind;
    EXPECT_GT(accepted[kind], drafts[kind] / 4) << kind;
    EXPECT_LT(accepted[kind], drafts[kind] * 9 / 10) << kind;
  }
}

}  // namespace
}  // namespace megatron
