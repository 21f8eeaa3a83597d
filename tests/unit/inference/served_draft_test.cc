// Models that draft for models, on the engine: in batch-invariant mode every number of a request is
// the same with and without them, and all drafts of a model for itself stand.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/speculation/draft_model.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

struct ModeScope {
  ModeScope() { set_batch_invariant(true); }
  ~ModeScope() { set_batch_invariant(false); }
};

std::vector<std::pair<std::string, ModelConfig>> drafting_kinds() {
  ModelConfig learned = small_served_model();
  learned.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  learned.transformer.max_position_embeddings = 48;
  ModelConfig window = small_served_model();
  window.transformer.window_size = {5, 0};
  ModelConfig experts = small_served_model();
  experts.transformer.num_experts = 4;
  experts.transformer.moe_router_topk = 2;
  experts.transformer.moe_router_pre_softmax = true;
  std::vector<std::pair<std::string, ModelConfig>> all = {{"grouped queries", small_served_model()},
                                                          {"learned positions", learned},
                                                          {"windows", window},
                                                          {"experts", experts}};
  for (auto& [name, config] : all)
    config.transformer.attention_dropout = config.transformer.hidden_dropout = 0.0;
  return all;
}

// With every option of sampling; prompts that begin alike; several choices.
std::vector<RequestSpec> drafted_requests(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<RequestSpec> specs;
  for (const DrivenSequence& s : random_sequences(random, 10)) {
    RequestSpec& spec = specs.emplace_back();
    spec.prompt = s.start.ids;
    spec.sampling = s.start.sampling;
    spec.log_probabilities = s.start.log_probabilities;
    spec.log_probabilities.output_top = 1;
    spec.stop.max_tokens = s.tokens + 12;
    spec.stop.min_tokens = 2;
    spec.stop.end_tokens = {0, 7};
    spec.choices = specs.size() % 4 == 0 ? 2 : 1;
  }
  return specs;
}

struct ServedTexts {
  std::map<std::pair<RequestId, int32_t>, std::vector<GeneratedToken>> tokens;
  std::map<std::pair<RequestId, int32_t>, std::vector<PositionLogProbabilities>> prompts;
  EngineStats stats;
};

RunnerOptions drafting_runner(uint32_t seed) { return small_runner(12 + 5 * (seed % 4)); }

ServedTexts serve_all(Model& model, uint32_t seed, std::shared_ptr<DraftSource> drafts) {
  ModelRunner runner(model, drafting_runner(seed));
  EngineOptions options;
  options.check_invariants = true;
  SchedulerConfig& config = options.scheduler;
  config.max_step_tokens = 12;
  config.max_drafts = 4;
  config.draft_source = std::move(drafts);
  config.poison_freed_blocks = true;
  const MonotonicClock clock;
  Engine engine(runner, nullptr, nullptr, clock, options);
  engine.step(0);
  int64_t open = 0;
  ServedTexts texts;
  for (const RequestSpec& spec : drafted_requests(seed)) {
    const Admission admission = engine.submit(spec);
    MEGATRON_CHECK(admission.id, admission.refusal->message);
    open += spec.choices;
    engine.step(0);  // some begin while others wait
  }
  while (open > 0) {
    engine.step(0);
    for (const Event& event : engine.take_events()) {
      const std::pair key(event.request, event.choice);
      auto& tokens = texts.tokens[key];
      tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
      if (!event.prompt_log_probabilities.empty())
        texts.prompts[key] = event.prompt_log_probabilities;
      open -= event.finish ? 1 : 0;
    }
  }
  texts.stats = engine.stats();
  return texts;
}

bool equal_bits(const ServedTexts& a, const ServedTexts& b) {
  const auto same = [](const GeneratedToken& x, const GeneratedToken& y) {
    return x.id == y.id && x.log_probabilities == y.log_probabilities;
  };
  return a.prompts == b.prompts && std::ranges::equal(a.tokens, b.tokens, [&](auto& x, auto& y) {
           return x.first == y.first && std::ranges::equal(x.second, y.second, same);
         });
}

// A model whose blocks hold all of its texts, or few of them.
struct DraftingModel {
  DraftingModel(Model& model, uint32_t seed)
      : runner(model, drafting_runner(seed + 1)),
        drafts(
            std::make_shared<DraftModel>(runner, DraftModelOptions{.vocab_size = kToyVocab,
                                                                   .max_step_tokens = 6 + seed % 9,
                                                                   .poison_freed_blocks = true})) {}
  ModelRunner runner;
  std::shared_ptr<DraftModel> drafts;
};

TEST(ServedDrafts, ChangeNoBitAndAllStandOfTheSameModel) {
  const ModeScope mode;
  const ParallelGroups one;
  uint64_t preempted = 0;
  for (const auto& [name, config] : drafting_kinds()) {
    Served served(Served::make(config, one), {}, at::kFloat);
    ModelConfig small = small_served_model();
    small.transformer.num_layers = 1;
    small.transformer.attention_dropout = small.transformer.hidden_dropout = 0.0;
    Served other(Served::make(small, one), {}, at::kFloat);
    uint64_t twins = 0, drafted = 0, accepted = 0;
    for (uint32_t seed = 0; seed < 4; ++seed) {
      const ServedTexts plain = serve_all(*served.model, seed, nullptr);
      EXPECT_EQ(plain.stats.drafts, 0U);
      DraftingModel twin(*served.model, seed), guessing(*other.model, seed);
      const ServedTexts same = serve_all(*served.model, seed, twin.drafts);
      EXPECT_TRUE(equal_bits(plain, same)) << name << " " << seed;
      EXPECT_EQ(same.stats.accepted_drafts, same.stats.drafts) << name << " " << seed;
      const ServedTexts guessed = serve_all(*served.model, seed, guessing.drafts);
      EXPECT_TRUE(equal_bits(plain, guessed)) << name << " " << seed;
      EXPECT_TRUE(twin.drafts->empty() && guessing.drafts->empty());
      twins += same.stats.drafts;
      preempted += same.stats.preemptions + guessed.stats.preemptions;
      drafted += guessed.stats.drafts;
      accepted += guessed.stats.accepted_drafts;
    }
    EXPECT_GT(twins, 100U) << name;
    EXPECT_GT(accepted, 4U) << name;
    EXPECT_LT(accepted, drafted * 3 / 4) << name;
  }
  EXPECT_GT(preempted, 5U);
}

}  // namespace
}  // namespace megatron
