#include "tests/unit/inference/served_schedules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/graphs/decode_graphs.h"
#include "megatron/inference/speculation/draft_model.h"
#include "megatron/scheduling/prompt_lookup.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/inference/toy_model.h"
#include "tests/unit/scheduling/fake_runner.h"

namespace megatron {
namespace {

constexpr int64_t kTick = 1'000'000;

class Draws {
 public:
  explicit Draws(uint32_t seed) : random_(seed) {}
  int below(int64_t n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  bool chance(int64_t n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<int64_t>(values.size())));
  }
  float value() { return std::uniform_real_distribution<float>(-1, 1)(random_); }

 private:
  std::mt19937 random_;
};

// Without an adapter, with each of two merged into it, and without once more.
std::vector<LoadedModel> adapted_models(LoadModelRequest base, const std::filesystem::path& adapter,
                                        const ParallelGroups& one) {
  std::vector<LoadedModel> models;
  const std::filesystem::path none;
  for (const auto& merged : {none, adapter, stronger_than(adapter), none}) {
    base.adapter = merged;
    models.push_back(load_model(base, one));
  }
  return models;
}

void draw_sampling(SamplingParameters& p, int32_t vocab, Draws& draws) {
  p.seed = static_cast<uint64_t>(1 + draws.below(5));
  p.temperature = draws.one_of({0.0, 0.7, 1.3});
  p.top_k = draws.one_of({0, 0, 5, 20});
  p.top_p = draws.one_of({1.0, 1.0, 0.8});
  p.min_p = draws.one_of({0.0, 0.0, 0.02});
  if (draws.chance(4)) p.repetition_penalty = 1.3;
  if (draws.chance(4)) p.presence_penalty = 0.6;
  if (draws.chance(3)) p.frequency_penalty = 0.5;
  if (draws.chance(5)) p.logit_bias = {{3, 2.0f}};
  if (draws.chance(5)) p.forbidden = {draws.below(vocab)};
}

void add_inputs(RequestSpec& spec, int64_t width, Draws& draws) {
  StateInput input{{draws.below(kToyVocab)}, {2, width}, {}};
  for (int64_t i = 0; i < 2 * width; ++i) input.values.push_back(draws.value());
  spec.state_input = std::make_shared<const StateInput>(std::move(input));
  if (draws.chance(2)) return;
  GivenRows rows{1 + draws.below(5), width, {}};
  for (int64_t i = 0; i < rows.count * width; ++i) rows.values.push_back(draws.value());
  spec.rows = std::make_shared<const GivenRows>(std::move(rows));
}

// Counts what plans have. Steps are read before the next one is planned, or after it. Steps of a
// device that computes by itself are waited for, so that a schedule does not depend on its speed.
class CountingRunner final : public StepRunner {
 public:
  CountingRunner(StepRunner& runner, bool launch_waits, Counts& counts)
      : runner_(runner), counts_(counts) {
    facts_ = runner.facts();
    facts_.launch_waits = launch_waits;
  }
  const RunnerFacts& facts() const override { return facts_; }
  void launch(const StepPlan& plan) override {
    for (const SlotStart& start : plan.starts) {
      adapter_of_[start.slot] = start.adapter;
      if (start.prompt_length < rows_of(start) + std::ssize(start.ids))
        ++counts_[plan.swap_in.empty() ? "computed again" : "swapped in"];
    }
    std::set<int32_t> adapters;
    for (const PlanPart& part : plan.parts) {
      adapters.insert(adapter_of_[part.slot]);
      if (part.first + part.count < part.known) ++counts_["divided prompts"];
    }
    counts_["steps with several adapters"] += adapters.size() > 1 ? 1 : 0;
    counts_["blocks copied on write"] += std::ssize(plan.copies);
    counts_["states swapped in"] += std::ssize(plan.state_swap_in);
    counts_["steps planned ahead"] += in_flight_++ > 0 ? 1 : 0;
    runner_.launch(plan);
  }
  std::optional<StepResult> take(int64_t wait_ns) override {
    constexpr int64_t kMinute = 60'000'000'000;
    std::optional<StepResult> result = runner_.take(std::max(wait_ns, kMinute));
    in_flight_ -= result ? 1 : 0;
    return result;
  }
  void begin(const RunnerTransition& transition) override { runner_.begin(transition); }
  std::optional<std::string> poll(int64_t wait_ns) override { return runner_.poll(wait_ns); }

 private:
  static int64_t rows_of(const SlotStart& start) { return start.rows ? start.rows->count : 0; }

  StepRunner& runner_;
  Counts& counts_;
  RunnerFacts facts_;
  std::map<int32_t, int32_t> adapter_of_;  // by slot
  int64_t in_flight_ = 0;
};

// Guesses what each request gets, often wrongly.
class KnownDrafts final : public DraftSource {
 public:
  using Known = std::function<const DrivenSequence&(RequestId request, int32_t choice)>;
  KnownDrafts(Known known, uint32_t seed) : known_(std::move(known)), draws_(seed) {}
  void propose(std::span<DraftQuery> queries) override {
    for (DraftQuery& query : queries) {
      const Sequence& sequence = *query.sequence;
      const std::vector<DrawnToken>& drawn = known_(sequence.request, sequence.choice).drawn;
      const size_t next = sequence.ids.size() - sequence.spec().prompt.size();
      const size_t end = std::min(drawn.size(), next + static_cast<size_t>(query.most));
      for (size_t i = next; i < end; ++i)
        query.drafts.push_back(draws_.chance(4) ? draws_.below(9) : drawn[i].id);
    }
  }
  void forget(const Sequence&) override {}

 private:
  const Known known_;
  Draws draws_;
};

// A model that drafts for the one that `target` runs, and leaves its device and comes back with it.
struct ScheduledDraftModel {
  ScheduledDraftModel(Served& served, const RunnerOptions& options, int64_t vocab_size,
                      int64_t more_tokens, StepRunner& target)
      : runner(*served.model, *served.weights, options),
        drafts(std::make_shared<DraftModel>(
            runner, DraftModelOptions{.vocab_size = vocab_size,
                                      .max_step_tokens = options.slots + more_tokens,
                                      .poison_freed_blocks = true})),
        both(target, runner, *drafts) {}
  ModelRunner runner;
  std::shared_ptr<DraftModel> drafts;
  DraftedRunner both;
};

class ServedSchedule {
 public:
  ServedSchedule(ScheduledModel& model, uint32_t seed, Counts& counts)
      : model_(model),
        draws_(seed),
        counts_(counts),
        runner_(model.model(), model.weights(), draw_runner()),
        drafting_(draw_drafting(seed)),
        counting_(drafting_ ? static_cast<StepRunner&>(drafting_->both) : runner_, draws_.chance(2),
                  counts),
        engine_(counting_, nullptr, nullptr, clock_, draw_options()) {
    tick(0);
  }

  void execute() {
    const int requests = 4 + draws_.below(8);
    for (int turn = 0; std::ssize(asked_) < requests || open_ > 0; ++turn) {
      ASSERT_LT(turn, 4000) << "requests do not end";
      if (std::ssize(asked_) < requests && draws_.chance(3)) submit();
      if (draws_.chance(40) && !asked_.empty())
        engine_.cancel(std::next(asked_.begin(), draws_.below(std::ssize(asked_)))->first);
      if (draws_.chance(20)) command();
      tick(draws_.below(3) * kTick);
    }
    if (state() != EngineState::kRunning) give(ResumeCommand{});
    for (int i = 0; i < 4; ++i) tick(kTick);
    for (const auto& [id, asked] : asked_) check(asked);
    const EngineStats stats = engine_.stats();
    EXPECT_EQ(stats.queued + stats.running + stats.preempted, 0);
    EXPECT_EQ(stats.blocks_held, 0);
    EXPECT_EQ(static_cast<int64_t>(stats.output_tokens), told_) << "tokens of events";
    if (drafting_) {
      EXPECT_TRUE(drafting_->drafts->empty());
    }
    if (runner_.facts().owns_state) {
      EXPECT_EQ(stats.cached_tokens, 0u) << "states are of no prefix";
    }
    count(stats);
  }

 private:
  struct Received {
    DrivenSequence got;
    std::optional<FinishReason> reason;
  };
  struct Asked {
    int index = 0;
    std::vector<Received> choices;
  };

  RunnerOptions draw_runner() {
    RunnerOptions options;
    options.slots = 2 + draws_.below(6);
    const int64_t longest = model_.longest();
    // Kernels of a GPU know blocks of whole tiles.
    options.block_size = on_gpu() ? draws_.one_of({16, 32, 64}) : 1 + draws_.below(6);
    options.max_positions = longest;
    const auto whole =
        static_cast<int32_t>((longest + options.block_size - 1) / options.block_size);
    options.device_blocks = whole + draws_.below(3);
    options.host_blocks = draws_.chance(5) ? 0 : whole + draws_.below(whole);
    options.host_states = 2 + draws_.below(3);
    options.keeping.drafts = model_.is_toy() ? 0 : draws_.below(5);
    options.keeping.replays_chunks = draws_.chance(4);
    options.adapters = model_.adapters();
    if (on_gpu() && !draws_.chance(5))
      options.graph_sizes =
          graph_sizes(draws_.one_of({-1, 2, 5}), options.slots * (1 + options.keeping.drafts));
    return options;
  }
  // By draws of its own, so that a schedule without one is the same as before there were any.
  std::unique_ptr<ScheduledDraftModel> draw_drafting(uint32_t seed) {
    Draws draws(seed + 7777);
    if (model_.drafting() == nullptr || draws.chance(2)) return nullptr;
    const RunnerFacts& facts = runner_.facts();
    RunnerOptions options;
    options.slots = facts.slots;
    options.block_size = draws.one_of({16, 32, 64});
    options.max_positions = facts.max_positions;
    const int64_t whole = (facts.max_positions + options.block_size - 1) / options.block_size;
    // Of all texts, or so few that they take them from each other.
    options.device_blocks = static_cast<int32_t>(whole * (1 + draws.below(facts.slots)));
    if (!draws.chance(3)) options.graph_sizes = graph_sizes(-1, options.slots);
    return std::make_unique<ScheduledDraftModel>(*model_.drafting(), options, facts.vocab_size,
                                                 draws.below(20 * model_.place().stretch), runner_);
  }
  EngineOptions draw_options() {
    EngineOptions options;
    options.check_invariants = true;
    SchedulerConfig& config = options.scheduler;
    config.poison_freed_blocks = true;
    config.max_step_tokens = 1 + draws_.below(20 * model_.place().stretch);
    config.reserve_blocks = draws_.below(3);
    config.ageing_ns = draws_.one_of<int64_t>({kTick, 100 * kTick});
    config.max_preemptions = 1 + draws_.below(3);
    config.share_prefixes = !draws_.chance(6);
    config.max_idle_share = draws_.one_of({0.3, 1.0});
    config.swap_block_tokens = draws_.one_of({0.1, 0.1, 0.1, 2.0});
    const RunnerFacts& facts = runner_.facts();
    config.max_drafts = facts.owns_state   ? facts.state_drafts
                        : draws_.chance(2) ? 1 + draws_.below(5)
                                           : 0;
    if (config.max_drafts > 0 && draws_.chance(4)) {
      config.draft_source = std::make_shared<PromptLookup>(1, 4);
    } else if (config.max_drafts > 0) {
      const auto known = [this](RequestId request, int32_t choice) -> const DrivenSequence& {
        return model_.alone(asked_.at(request).index, choice);
      };
      config.draft_source = std::make_shared<KnownDrafts>(known, 1 + draws_.below(9));
    }
    if (drafting_) {
      if (config.max_drafts == 0) config.max_drafts = 3;
      config.draft_source = drafting_->drafts;
    }
    version_ = facts.weights_version;
    return options;
  }

  bool on_gpu() const { return !model_.place().device.is_cpu(); }
  EngineState state() const { return engine_.stats().state; }

  void submit() {
    const int index = draws_.below(ScheduledModel::kRequests);
    RequestSpec spec = model_.request(index);
    spec.choices = draws_.chance(4) ? 1 + draws_.below(3) : 1;
    spec.priority = draws_.below(3) - 1;
    if (draws_.chance(5)) spec.cache_salt = "tenant";
    if (draws_.chance(20)) spec.timeout_ns = (1 + draws_.below(30)) * kTick;
    const Admission admission = engine_.submit(spec);
    if (!admission.id) {
      ASSERT_EQ(admission.refusal->kind, Refusal::Kind::kUnavailable) << admission.refusal->message;
      give(ResumeCommand{});
      return;
    }
    Asked& asked = asked_[*admission.id];
    asked.index = index;
    asked.choices.resize(static_cast<size_t>(spec.choices));
    open_ += spec.choices;
  }

  void command() {
    const MemoryLevel levels[] = {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop};
    const EngineState now = state();
    const int what = draws_.below(6);
    if (now == EngineState::kSuspended || (now == EngineState::kPaused && what < 2)) {
      give(ResumeCommand{});
    } else if (now == EngineState::kPaused && what < 5) {
      const int cache = draws_.below(3), weights = draws_.below(3);
      give(SuspendCommand{levels[cache], levels[weights]});
      constexpr const char* kNames[] = {"kept", "offloaded", "dropped"};
      ++counts_[cat("caches ", kNames[cache])];
      ++counts_[cat("weights ", kNames[weights])];
    } else if (what < 4) {
      const PauseMode mode = draws_.chance(6)   ? PauseMode::kAbort
                             : draws_.chance(3) ? PauseMode::kFinish
                                                : PauseMode::kKeep;
      give(PauseCommand{mode});
      counts_["pauses with requests left"] += open_ > 0 ? 1 : 0;
    } else {
      give(UpdateWeightsCommand{"the same", ++version_, draws_.chance(2)});
      ++counts_["weights exchanged"];
    }
  }
  void give(EngineCommand command) {
    const bool may_be_late = std::holds_alternative<PauseCommand>(command);
    const Ticket ticket = engine_.command(std::move(command), 20 * kTick);
    for (int turn = 0; !ticket.outcome(); ++turn) {
      ASSERT_LT(turn, 20'000) << "a ticket has no outcome";
      tick(may_be_late ? kTick : 10, kTick);
    }
    EXPECT_TRUE(ticket.outcome()->message.empty() || may_be_late) << ticket.outcome()->message;
  }

  void tick(int64_t ns, int64_t wait_ns = 0) {
    clock_.advance(ns);
    engine_.step(wait_ns);
    for (Event& event : engine_.take_events()) {
      told_ += std::ssize(event.tokens);
      Received& choice = asked_.at(event.request).choices.at(static_cast<size_t>(event.choice));
      for (const GeneratedToken& token : event.tokens)
        choice.got.drawn.push_back({0, token.id, true, token.log_probabilities});
      if (!event.prompt_log_probabilities.empty())
        choice.got.scores = std::move(event.prompt_log_probabilities);
      if (!event.finish) continue;
      choice.reason = event.finish->reason;
      counts_["tokens from cached prefixes"] += event.finish->usage.cached_tokens;
      --open_;
    }
  }

  // All that it gets alone, or a beginning of it where it was ended.
  void check(const Asked& asked) {
    for (size_t i = 0; i < asked.choices.size(); ++i) {
      const Received& choice = asked.choices[i];
      ASSERT_TRUE(choice.reason);
      DrivenSequence want = model_.alone(asked.index, static_cast<int32_t>(i));
      if (i > 0) want.scores.clear();
      const StopConditions& stop = model_.request(asked.index).stop;
      FinishReason reason = FinishReason::kLength;
      if (!want.drawn.empty() && std::ranges::count(stop.stop_tokens, want.drawn.back().id) > 0)
        reason = FinishReason::kStopToken;
      if (!want.drawn.empty() && std::ranges::count(stop.end_tokens, want.drawn.back().id) > 0)
        reason = FinishReason::kEndToken;
      if (is_complete(*choice.reason)) {
        EXPECT_EQ(*choice.reason, reason);
        ++counts_["whole texts"];
      } else {
        ASSERT_TRUE(*choice.reason == FinishReason::kCancelled ||
                    *choice.reason == FinishReason::kDeadline)
            << name(*choice.reason);
        ++counts_[*choice.reason == FinishReason::kCancelled ? "cancelled" : "out of time"];
        want.drawn.resize(std::min(want.drawn.size(), choice.got.drawn.size()));
        if (choice.got.scores.empty()) want.scores.clear();
      }
      counts_["tokens"] += std::ssize(choice.got.drawn);
      expect_equal({choice.got}, {want}, cat("request ", asked.index, ", choice ", i));
      if (!model_.place().alone_by_runner) continue;
      EXPECT_EQ(choice.got.scores, want.scores);
      for (size_t j = 0; j < want.drawn.size() && j < choice.got.drawn.size(); ++j)
        EXPECT_EQ(choice.got.drawn[j].log_probabilities, want.drawn[j].log_probabilities);
    }
  }

  void count(const EngineStats& stats) {
    counts_["preemptions"] += static_cast<int64_t>(stats.preemptions);
    counts_["blocks swapped out"] += static_cast<int64_t>(stats.swapped_blocks);
    counts_["guesses that stand"] += static_cast<int64_t>(stats.accepted_drafts);
    counts_["guesses that fall"] += static_cast<int64_t>(stats.drafts - stats.accepted_drafts);
    if (on_gpu()) counts_["steps by graphs"] += runner_.graph_steps();
    if (!drafting_) return;
    counts_["guesses of models that stand"] += static_cast<int64_t>(stats.accepted_drafts);
    counts_["guesses of models that fall"] +=
        static_cast<int64_t>(stats.drafts - stats.accepted_drafts);
    counts_["steps of drafting models by graphs"] += drafting_->runner.graph_steps();
  }

  ScheduledModel& model_;
  Draws draws_;
  Counts& counts_;
  FakeClock clock_;
  ModelRunner runner_;
  const std::unique_ptr<ScheduledDraftModel> drafting_;  // null: guesses are of others
  CountingRunner counting_;
  int64_t version_ = 0;
  Engine engine_;
  std::map<RequestId, Asked> asked_;
  int64_t open_ = 0, told_ = 0;  // choices; tokens of events
};

}  // namespace

ScheduledModel::ScheduledModel(std::string name,
                               const std::function<std::unique_ptr<Model>()>& make,
                               const ScheduledPlace& place)
    : name_(std::move(name)),
      place_(place),
      twin_(std::make_unique<Served>(make(), WeightReader(), place.type, place.device)),
      served_(std::make_unique<Served>(
          make(), [this](const std::string&) { return first_values_; }, place.type, place.device)),
      model_(*served_->model),
      weights_(*served_->weights) {
  keep_values();
  if (place.alone_by_runner) make_drafting(make());
}

ScheduledModel::ScheduledModel(std::string name, LoadModelRequest base,
                               const std::filesystem::path& adapter, const ParallelGroups& one,
                               const ScheduledPlace& place)
    : name_(std::move(name)),
      place_(place),
      loaded_(adapted_models(std::move(base), adapter, one)),
      adapters_(load_adapters(loaded_[3], {{"one", adapter}, {"two", stronger_than(adapter)}})),
      twin_adapters_(
          place.alone_by_runner
              ? load_adapters(loaded_[0], {{"one", adapter}, {"two", stronger_than(adapter)}})
              : AdapterList()),
      loaded_weights_(std::make_unique<ServedWeights>(
          *loaded_[3].store, [this](const std::string&) { return first_values_; }, "first")),
      model_(*loaded_[3].model),
      weights_(*loaded_weights_) {
  keep_values();
}

ScheduledModel::~ScheduledModel() = default;

bool ScheduledModel::is_toy() const { return model_.sequence_input() != SequenceInputUse::kNone; }

const RequestSpec& ScheduledModel::request(int index) {
  const auto found = requests_.find(index);
  return found != requests_.end() ? found->second
                                  : requests_.emplace(index, draw_request(index)).first->second;
}

const DrivenSequence& ScheduledModel::alone(int index, int32_t choice) {
  const std::pair key(index, choice);
  if (const auto found = given_alone_.find(key); found != given_alone_.end()) return found->second;
  const RequestSpec& spec = request(index);
  DrivenSequence given;
  given.start.choice = choice;
  given.start.ids = spec.prompt;
  given.start.rows = spec.rows;
  given.start.sampling = spec.sampling;
  given.start.log_probabilities = spec.log_probabilities;
  given.start.min_tokens = spec.stop.min_tokens;
  given.start.ends = ends_of(spec.stop);
  given.tokens = std::max<int64_t>(1, spec.stop.max_tokens);
  given.start.adapter = spec.adapter;
  const auto logits_of = [&](const std::vector<int32_t>& ids) { return logits(spec, ids); };
  DrivenSequence own = place_.alone_by_runner
                           ? by_runner(given)
                           : megatron::alone(given, logits_of, model_.config().vocab_size);
  const auto end = std::ranges::find_if(own.drawn, [&](const DrawnToken& drawn) {
    return std::ranges::count(given.start.ends, drawn.id) > 0;
  });
  if (end != own.drawn.end()) own.drawn.erase(end + 1, own.drawn.end());
  if (spec.stop.max_tokens == 0) own.drawn.clear();
  if (const int64_t from = spec.log_probabilities.prompt_from; !own.scores.empty()) {
    const int64_t left_out = spec.rows ? from : std::max<int64_t>(0, from - 1);
    own.scores.erase(own.scores.begin(),
                     own.scores.begin() + std::min(left_out, std::ssize(own.scores)));
  }
  return given_alone_.emplace(key, std::move(own)).first->second;
}

void ScheduledModel::keep_values() {
  for (Parameter* parameter : model_.parameters())
    first_values_.push_back(parameter->value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
}

void ScheduledModel::make_drafting(std::unique_ptr<Model> model) {
  drafting_ = std::make_unique<Served>(
      std::move(model), [this](const std::string&) { return drafting_values_; }, place_.type,
      place_.device);
  at::manual_seed(9);
  for (Parameter* parameter : drafting_->model->parameters()) {
    parameter->value.add_(at::randn_like(parameter->value), 0.02);
    drafting_values_.push_back(
        parameter->value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
}

at::Tensor ScheduledModel::logits(const RequestSpec& spec, const std::vector<int32_t>& ids) {
  if (!is_toy()) return full_logits(twin_ ? *twin_->model : *loaded_[spec.adapter + 1].model, ids);
  const std::vector<int64_t> wide(spec.state_input->ids.begin(), spec.state_input->ids.end());
  const SequenceInput input{at::tensor(wide, at::kLong),
                            at::tensor(spec.state_input->values).view(spec.state_input->shape)};
  at::Tensor rows;
  if (spec.rows) rows = at::tensor(spec.rows->values).view({spec.rows->count, -1}).to(at::kDouble);
  return toy_logits(*twin_->model, input, rows, ids).narrow(1, 0, kToyVocab);
}

DrivenSequence ScheduledModel::by_runner(const DrivenSequence& given) {
  RunnerOptions options = small_runner(static_cast<int32_t>(longest() / 16 + 1));
  options.block_size = 16;
  options.adapters = twin_adapters_.empty() ? nullptr : &twin_adapters_;
  ModelRunner runner(twin_ ? *twin_->model : *loaded_[0].model, options);
  std::vector<DrivenSequence> one = {given};
  PlanDriver(runner, {.whole_prompts = 1.0}, 1).run(one);
  return one[0];
}

RequestSpec ScheduledModel::draw_request(int index) {
  Draws draws(static_cast<uint32_t>(1000 * name_.size() + index));
  const auto vocab = static_cast<int32_t>(model_.config().vocab_size);
  RequestSpec spec;
  if (is_toy()) add_inputs(spec, model_.config().transformer.hidden_size, draws);
  if (index > 0 && draws.chance(4)) {
    // The next turn of a conversation begins with the one before it and its answer.
    const int before = draws.below(index);
    spec.adapter = request(before).adapter;
    spec.prompt = request(before).prompt;
    if (!is_toy())
      for (const DrawnToken& drawn : alone(before, 0).drawn) spec.prompt.push_back(drawn.id);
    const auto most = static_cast<size_t>((is_toy() ? 20 : 26) * place_.stretch);
    spec.prompt.resize(std::min(spec.prompt.size(), most));
  } else {
    // Prompts begin alike.
    const int stem = draws.below(3), same = draws.below(18 * place_.stretch);
    for (int i = 0; i < same; ++i) spec.prompt.push_back((stem * 17 + i * (stem + 2)) % vocab);
    if (adapters() != nullptr) spec.adapter = draws.below(std::ssize(adapters_) + 1) - 1;
  }
  for (int i = spec.prompt.empty() ? 1 : draws.below(6); i > 0; --i)
    spec.prompt.push_back(draws.below(vocab));
  if (spec.rows && draws.chance(3)) spec.prompt.clear();
  draw_sampling(spec.sampling, vocab, draws);
  StopConditions& stop = spec.stop;
  stop.max_tokens = 1 + draws.below(16);
  stop.min_tokens = draws.chance(3) ? draws.below(stop.max_tokens + 1) : 0;
  if (draws.chance(2)) stop.end_tokens = {0, 7, draws.below(vocab)};
  if (draws.chance(4)) stop.stop_tokens = {draws.below(vocab)};
  LogProbabilityWishes& wishes = spec.log_probabilities;
  if (draws.chance(3)) wishes.output_top = draws.below(4);
  wishes.processed = draws.chance(2);
  if (draws.chance(4)) {
    wishes.prompt_top = draws.below(3);
    wishes.prompt_from = draws.below(std::ssize(spec.prompt) + 1);
    if (!spec.prompt.empty() && draws.chance(4)) stop.max_tokens = stop.min_tokens = 0;
  }
  return spec;
}

void play_schedule(ScheduledModel& model, uint32_t seed, Counts& counts) {
  ServedSchedule(model, seed, counts).execute();
}

}  // namespace megatron
