// The proof that a model is served as it was trained holds, and fails for what is not.
#include "megatron/inference/evaluation/served_proof.h"

#include <gtest/gtest.h>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/evaluation/scoring.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

ModelConfig proved_model() {
  ModelConfig config = small_served_model();
  config.transformer.num_layers = 4;
  return config;
}

std::vector<ServedText> served_over(const ModelConfig& config, int tensor, int stages,
                                    const ServedWorkload& workload) {
  LocalLinks links(tensor * stages);
  std::vector<ServedText> texts;
  run_ranks(tensor * stages, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    parallel.pipeline_model_parallel_size = stages;
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    Served served(Served::make(config, groups));
    std::vector<ServedText> got = serve_workload(*served.model, workload, links, world->rank());
    if (world->rank() == 0) texts = std::move(got);
  });
  return texts;
}

TEST(ServedProof, HoldsOnEveryLayoutOfRanks) {
  const ParallelGroups one;
  Served served(Served::make(proved_model(), one));
  for (const auto& [tensor, stages] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    const ServedWorkload workload = served_workload(kToyVocab, 40, 3);
    const std::vector<ServedText> texts = served_over(proved_model(), tensor, stages, workload);
    EXPECT_EQ(texts.size(), 10u);
    const ServedComparison compared = compare_served(*served.model, texts, kServedBand);
    EXPECT_EQ(compared.log_probabilities.failed, 0) << compared.log_probabilities.worst;
    EXPECT_EQ(compared.greedy_tokens.failed, 0) << compared.greedy_tokens.worst;
    EXPECT_GT(compared.log_probabilities.compared, 200);
    EXPECT_EQ(compared.greedy_tokens.compared, 30);
    EXPECT_GT(compared.cached_tokens, 40) << "the second wave reads prefixes of the first";
  }
}

// Models with states, also with stages of different numbers of layers, and tensor ranks that share
// a group. Prefixes are not kept.
TEST(ServedProof, HoldsForPatterns) {
  for (const char* pattern : {"MG*-M", "M-|-*-M-G"}) {
    const ModelConfig config = hybrid_served_model(pattern);
    const ParallelGroups one;
    Served served(Served::make(config, one));
    for (const auto& [tensor, stages] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {1, 3}}) {
      const ServedWorkload workload = served_workload(kToyVocab, 40, 3);
      const std::vector<ServedText> texts = served_over(config, tensor, stages, workload);
      const ServedComparison compared = compare_served(*served.model, texts, kServedBand);
      EXPECT_EQ(compared.log_probabilities.failed, 0) << compared.log_probabilities.worst;
      EXPECT_EQ(compared.greedy_tokens.failed, 0) << compared.greedy_tokens.worst;
      EXPECT_GT(compared.log_probabilities.compared, 200);
      EXPECT_EQ(compared.cached_tokens, 0);
    }
  }
}

// The engine's log-probabilities of prompts, in chunks, against the forward of `evaluate`.
TEST(ServedProof, PromptsHaveTheScoresOfEvaluate) {
  const ParallelGroups one;
  Served served(Served::make(proved_model(), one));
  LocalLinks links(1);
  std::vector<ServedText> texts =
      serve_workload(*served.model, served_workload(kToyVocab, 40, 3), links, 0);
  std::erase_if(texts, [](const ServedText& text) { return text.prompt.empty(); });
  std::vector<ScoreRequest> requests;
  for (const ServedText& text : texts)
    requests.push_back({text.spec.prompt, static_cast<int64_t>(text.prompt.size())});
  const std::vector<Score> scores = score(*served.model, one, requests);
  ASSERT_GE(scores.size(), 5u);
  for (size_t i = 0; i < scores.size(); ++i) {
    double sum = 0.0;
    for (const PositionLogProbabilities& told : texts[i].prompt)
      sum += static_cast<double>(told.chosen.log_probability);
    EXPECT_NEAR(sum, scores[i].logprob, 1e-6 * std::abs(sum)) << i;
  }
}

TEST(ServedProof, TellsWhatIsNotSoFromRounding) {
  const ParallelGroups one;
  Served served(Served::make(proved_model(), one));
  LocalLinks links(1);
  const std::vector<ServedText> texts =
      serve_workload(*served.model, served_workload(kToyVocab, 40, 3), links, 0);
  const auto failed = [&](std::vector<ServedText> given) {
    const ServedComparison compared = compare_served(*served.model, given, kServedBand);
    return std::pair(compared.log_probabilities.failed, compared.greedy_tokens.failed);
  };
  EXPECT_EQ(failed(texts), std::pair(int64_t{0}, int64_t{0}));
  std::vector<ServedText> changed = texts;
  changed[0].output[2].chosen.log_probability += 3e-6f;
  EXPECT_EQ(failed(changed).first, 1);
  changed = texts;
  changed[1].prompt[5].chosen.log_probability = std::nanf("");
  EXPECT_EQ(failed(changed).first, 1);
  changed = texts;
  changed[2].tokens.back() = (changed[2].tokens.back() + 1) % kToyVocab;
  EXPECT_EQ(failed(changed).second, 1);
  // A weight that the server has not got: every text differs.
  served.model->parameters().back()->value.mul_(1.0 + 1e-5);
  EXPECT_GT(failed(texts).first, 100);
}

}  // namespace
}  // namespace megatron
