// Log-likelihoods against the full logits: for any batches, on tensor-parallel and data-parallel
// ranks.
#include "megatron/inference/evaluation/scoring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/generator.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

LoadModelRequest request_for(const std::string& folder) {
  LoadModelRequest request;
  request.load = MEGATRON_SOURCE_DIR "/tests/golden/" + folder;
  request.dtype = at::kFloat;
  return request;
}

// Texts of ids: of many lengths, some with equal inputs and other last ids.
std::vector<std::vector<int32_t>> texts(int64_t vocab_size) {
  std::vector<std::vector<int32_t>> out;
  uint32_t state = 12345;
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> ids;
    for (int j = 0; j < 2 + (i * 7) % 29; ++j) {
      state = state * 1664525u + 1013904223u;
      ids.push_back(static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(vocab_size)));
    }
    out.push_back(ids);
    if (i % 3 == 0) {
      ids.back() = (ids.back() + 1) % static_cast<int32_t>(vocab_size);
      out.push_back(ids);
    }
  }
  return out;
}

std::vector<ScoreRequest> requests_for(const std::vector<std::vector<int32_t>>& texts) {
  std::vector<ScoreRequest> out;
  for (size_t i = 0; i < texts.size(); ++i)
    out.push_back({texts[i], std::min<int64_t>(static_cast<int64_t>(texts[i].size()) - 1,
                                               1 + static_cast<int64_t>(i % 5))});
  return out;
}

std::vector<Score> by_full_logits(Model& model, const std::vector<ScoreRequest>& requests) {
  std::vector<Score> out;
  for (const ScoreRequest& request : requests) {
    const at::Tensor table = full_logits(model, request.ids.first(request.ids.size() - 1))
                                 .to(at::kDouble)
                                 .log_softmax(-1);
    Score score;
    for (auto j = static_cast<int64_t>(request.ids.size()) - 1 - request.num_scored;
         j + 1 < static_cast<int64_t>(request.ids.size()); ++j) {
      const int32_t id = request.ids[static_cast<size_t>(j + 1)];
      score.logprob += table[j][id].item<double>();
      score.greedy &= table[j].argmax().item<int64_t>() == id;
    }
    out.push_back(score);
  }
  return out;
}

void expect_equal(const std::vector<Score>& actual, const std::vector<Score>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual[i].logprob, expected[i].logprob, 2e-5 * std::abs(expected[i].logprob)) << i;
    EXPECT_EQ(actual[i].greedy, expected[i].greedy) << i;
  }
}

class ScoringTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

// phi3 rotates texts beyond its original length by other frequencies: rows must not share a batch
// then.
TEST_F(ScoringTest, WhateverTheBatches) {
  for (const char* folder : {"evaluate/model", "hf/gpt2", "hf/phi3"}) {
    const ParallelGroups groups;
    const LoadedModel loaded = load_model(request_for(folder), groups);
    const auto ids = texts(loaded.config.vocab_size);
    const std::vector<ScoreRequest> requests = requests_for(ids);
    const std::vector<Score> expected = by_full_logits(*loaded.model, requests);
    for (const int64_t batch_tokens : {1, 64, 8192}) {
      SCOPED_TRACE(cat(folder, " ", batch_tokens));
      uint64_t done = 0;
      expect_equal(score(*loaded.model, groups, requests, {batch_tokens},
                         [&](uint64_t count) { done += count; }),
                   expected);
      EXPECT_EQ(done, requests.size());
    }
  }
}

TEST_F(ScoringTest, TheMostLikelyIdsAreGreedy) {
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request_for("evaluate/model"), groups);
  std::vector<int32_t> ids = {5, 300};
  for (int i = 0; i < 4; ++i)
    ids.push_back(static_cast<int32_t>(full_logits(*loaded.model, ids)
                                           .select(0, static_cast<int64_t>(ids.size()) - 1)
                                           .argmax()
                                           .item<int64_t>()));
  std::vector<int32_t> other = ids;
  other[3] = (other[3] + 1) % 390;
  const std::vector<ScoreRequest> requests = {{ids, 4}, {other, 4}, {other, 0}};
  const std::vector<Score> scores = score(*loaded.model, groups, requests);
  EXPECT_TRUE(scores[0].greedy);
  EXPECT_FALSE(scores[1].greedy);
  EXPECT_EQ(scores[2].logprob, 0.0);
}

TEST_F(ScoringTest, OnSeveralRanks) {
  const ParallelGroups one;
  const LoadedModel loaded = load_model(request_for("evaluate/model"), one);
  const auto ids = texts(loaded.config.vocab_size);
  const std::vector<ScoreRequest> requests = requests_for(ids);
  const std::vector<Score> expected = by_full_logits(*loaded.model, requests);
  for (const int64_t tp : {1, 2}) {
    std::mutex mutex;
    run_ranks(4 / (3 - static_cast<int>(tp)), [&](const std::shared_ptr<Backend>& world) {
      ParallelConfig config;
      config.tensor_model_parallel_size = tp;
      const ParallelGroups groups = make_parallel_groups(config, world);
      const LoadedModel own = load_model(request_for("evaluate/model"), groups);
      const std::vector<Score> scores = score(*own.model, groups, requests, {64});
      const std::lock_guard lock(mutex);
      SCOPED_TRACE(cat("tp ", tp, ", rank ", world->rank()));
      expect_equal(scores, expected);
    });
  }
}

TEST_F(ScoringTest, WhatCannotBeScoredIsRefused) {
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request_for("hf/gpt2"), groups);
  const auto refusal = [&](const std::vector<int32_t>& ids, int64_t num_scored) {
    const std::vector<ScoreRequest> requests = {{ids, num_scored}};
    return error_of([&] { score(*loaded.model, groups, requests); });
  };
  EXPECT_EQ(refusal({1, 2}, 2), "request 0 scores 2 of 2 token ids; the first needs one before it");
  EXPECT_EQ(refusal({1, 2, 100000}, 1),
            cat("request 0 has the token id 100000, the model's vocabulary has ",
                loaded.config.vocab_size));
  const int64_t limit = max_positions(loaded.config);
  EXPECT_EQ(
      refusal(std::vector<int32_t>(static_cast<size_t>(limit + 2), 1), 1),
      cat("request 0: ", limit + 1, " token ids are beyond the model's ", limit, " positions"));
  EXPECT_EQ(refusal(std::vector<int32_t>(static_cast<size_t>(limit + 1), 1), 1), "");
}

}  // namespace
}  // namespace megatron
