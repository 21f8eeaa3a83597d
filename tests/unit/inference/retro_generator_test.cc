// Texts continued with neighbours: as by the full forward over the same neighbours, in batches and
// alone; each chunk is looked up once.
#include "megatron/inference/retrieval/retro_generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/evaluation/neighbor_scoring.h"
#include "megatron/models/model_table.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

constexpr int64_t kChunk = 8, kNeighbors = 2, kVocabulary = 257;

ModelConfig retro_model(std::vector<int64_t> layers) {
  ModelConfig config;
  config.type = "retro";
  TransformerConfig& t = config.transformer;
  t.num_layers = 4;
  t.hidden_size = 32;
  t.num_attention_heads = 4;
  t.seq_length = 64;
  t.max_position_embeddings = 200;
  t.init_method_std = 0.4;
  config.vocab_size = kVocabulary;
  config.padded_vocab_size = 320;
  RetroConfig own;
  own.retro_chunk_length = kChunk;
  own.retro_num_neighbors = kNeighbors;
  own.retro_layers = std::move(layers);
  config.own = OwnConfig(own);
  return config;
}

ModelConfig retro_model_with_rope() {
  ModelConfig config = retro_model({1, 4});
  TransformerConfig& t = config.transformer;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.swiglu = true;
  t.add_bias_linear = false;
  t.untie_embeddings_and_output_weights = true;
  t.group_query_attention = true;
  t.num_query_groups = 2;
  return config;
}

// A model with its memory, in fp64.
struct RetroTestModel {
  explicit RetroTestModel(ModelConfig config) {
    at::set_num_threads(1);
    config.transformer.finalize();
    model = make_model(config, groups);
    store = std::make_unique<PlainParameterStore>(*model, at::kDouble, at::kCPU, false);
    initialize_parameters(*model, 5, groups);
  }
  const ParallelGroups groups;
  std::unique_ptr<Model> model;
  std::unique_ptr<PlainParameterStore> store;
};

std::unique_ptr<Tokenizer> bytes() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

// Some chunks have no neighbours, some one; some neighbours are short. They follow from the ids.
NeighborIds neighbors_of(const WholeChunk& chunk) {
  uint32_t seed = 17;
  for (const int32_t id : chunk.ids) seed = seed * 31 + static_cast<uint32_t>(id);
  std::mt19937 random(seed);
  NeighborIds found(random() % 5 == 0 ? 0 : random() % 4 == 0 ? 1 : 3);
  for (std::vector<int32_t>& ids : found) {
    ids.resize(1 + random() % (2 * kChunk + 3));
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % kVocabulary);
  }
  return found;
}

struct Asked {
  std::map<std::pair<int64_t, int64_t>, int> times;  // by text and chunk
  int calls = 0;
  FindNeighbors find() {
    return [this](std::span<const WholeChunk> chunks) {
      ++calls;
      std::vector<NeighborIds> found;
      for (const WholeChunk& chunk : chunks) {
        ++times[{chunk.text, chunk.chunk}];
        found.push_back(neighbors_of(chunk));
      }
      return found;
    };
  }
};

GenerateOptions greedily(int64_t tokens) {
  GenerateOptions options;
  options.sampling.greedy = true;
  options.tokens_to_generate = tokens;
  options.stop_at_eod = false;
  return options;
}

at::Tensor logits_of(RetroTestModel& model, const std::vector<int32_t>& ids, size_t prompt) {
  std::vector<NeighborIds> found;
  for (const WholeChunk& chunk : chunks_of_text(ids, 0, kChunk, static_cast<int64_t>(prompt)))
    found.push_back(neighbors_of(chunk));
  return full_logits_with_neighbors(*model.model, ids,
                                    neighbor_columns(found, kNeighbors, kChunk, /*fill=*/256));
}

class GenerateWithNeighbors : public testing::TestWithParam<ModelConfig> {};

// 128 tokens are whole chunks, so that one full forward has the borders of all of them.
TEST_P(GenerateWithNeighbors, EqualsTheFullForward) {
  constexpr int64_t kTokens = 128;
  RetroTestModel model(GetParam());
  const std::vector<std::string> prompts = {"abc", "a prompt", "this one has thirty-one letters"};
  Asked together;
  const std::vector<Generation> batch =
      generate_with_neighbors(*model.model, *bytes(), prompts, greedily(kTokens), together.find());
  for (size_t i = 0; i < prompts.size(); ++i) {
    Asked asked;
    std::string streamed;
    const Generation alone = generate_with_neighbors(
        *model.model, *bytes(), std::span(prompts).subspan(i, 1), greedily(kTokens), asked.find(),
        [&](size_t, std::string_view piece) { streamed += piece; })[0];
    EXPECT_EQ(batch[i].tokens, alone.tokens);
    EXPECT_EQ(streamed, alone.text);
    ASSERT_EQ(std::ssize(alone.tokens), kTokens);
    std::vector<int32_t> ids = alone.prompt_tokens;
    const int64_t prompt = std::ssize(ids), first = (prompt - 1) % kChunk + 1;
    ids.insert(ids.end(), alone.tokens.begin(), alone.tokens.end());
    const at::Tensor best =
        logits_of(model, ids, static_cast<size_t>(prompt)).argmax(1).narrow(0, prompt - 1, kTokens);
    std::vector<int32_t> expected;
    for (int64_t j = 0; j < kTokens; ++j)
      expected.push_back(static_cast<int32_t>(best[j].item<int64_t>()));
    EXPECT_EQ(alone.tokens, expected) << prompts[i];
    // The last token is generated and not read.
    const int64_t whole = 1 + (prompt + kTokens - 1 - first) / kChunk;
    EXPECT_EQ(std::ssize(asked.times), whole);
    for (const auto& [chunk, times] : asked.times) EXPECT_EQ(times, 1) << chunk.second;
    EXPECT_EQ(asked.calls, 1 + kTokens / kChunk - 1);
  }
  for (const auto& [chunk, times] : together.times) EXPECT_EQ(times, 1) << chunk.second;
}

INSTANTIATE_TEST_SUITE_P(Models, GenerateWithNeighbors,
                         testing::Values(retro_model({2, 3}), retro_model({4}),
                                         retro_model_with_rope()));

TEST(GenerateWithNeighborsTest, ReadsNothingWhereNothingIsFound) {
  RetroTestModel model(retro_model({2, 3}));
  const std::vector<std::string> prompts = {"a prompt"};
  const FindNeighbors none = [](std::span<const WholeChunk> chunks) {
    return std::vector<NeighborIds>(chunks.size());
  };
  Asked asked;
  const auto without =
      generate_with_neighbors(*model.model, *bytes(), prompts, greedily(24), none)[0].tokens;
  const auto with =
      generate_with_neighbors(*model.model, *bytes(), prompts, greedily(24), asked.find())[0]
          .tokens;
  EXPECT_NE(with, without);
}

// Rows of several lengths in one batch; chunks are cut from the beginning, and what is behind a
// row's last whole chunk reads nothing more.
TEST(ScoringWithNeighbors, EqualsTheFullForward) {
  RetroTestModel model(retro_model({2, 3}));
  std::mt19937 random(3);
  std::vector<std::vector<int32_t>> texts(3);
  std::vector<ScoreRequest> requests;
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i].resize(25 + 6 * i);
    for (int32_t& id : texts[i]) id = static_cast<int32_t>(random() % kVocabulary);
    requests.push_back({texts[i], 20});
  }
  Asked asked;
  const ScoringOptions options =
      scoring_with_neighbors(model.model->config(), *bytes(), asked.find());
  const std::vector<Score> scores = score(*model.model, model.groups, requests, options);
  for (size_t i = 0; i < texts.size(); ++i) {
    std::vector<int32_t> ids(texts[i].begin(), texts[i].end() - 1);
    std::vector<NeighborIds> found;
    for (const WholeChunk& chunk : chunks_of_text(ids, 0, kChunk, kChunk))
      found.push_back(neighbors_of(chunk));
    const int64_t length = std::ssize(ids), whole = (length + kChunk - 1) / kChunk * kChunk;
    ids.resize(static_cast<size_t>(whole), 0);  // no row sees what is behind it
    found.resize(static_cast<size_t>(whole / kChunk));
    const at::Tensor losses =
        full_logits_with_neighbors(*model.model, ids,
                                   neighbor_columns(found, kNeighbors, kChunk, 256))
            .log_softmax(1);
    double expected = 0;
    for (int64_t j = length - 20; j < length; ++j)
      expected += losses[j][texts[i][static_cast<size_t>(j + 1)]].item<double>();
    EXPECT_NEAR(scores[i].logprob, expected, 1e-9 * std::abs(expected));
  }
  EXPECT_EQ(std::ssize(asked.times), 3 + 3 + 4);
}

TEST(GenerateWithNeighborsTest, EndsAsOtherTexts) {
  RetroTestModel model(retro_model({2, 3}));
  const std::vector<std::string> prompts = {"a prompt"};
  Asked asked;
  GenerateOptions options = greedily(24);
  const Generation whole =
      generate_with_neighbors(*model.model, *bytes(), prompts, options, asked.find())[0];
  EXPECT_EQ(whole.finish_reason, FinishReason::kLength);
  options.stop_tokens = {whole.tokens[5]};
  const Generation ended =
      generate_with_neighbors(*model.model, *bytes(), prompts, options, asked.find())[0];
  EXPECT_EQ(ended.finish_reason, FinishReason::kEndToken);
  const auto at = std::ranges::find(whole.tokens, whole.tokens[5]);
  EXPECT_EQ(ended.tokens, std::vector<int32_t>(whole.tokens.begin(), at));
  EXPECT_EQ(error_of([&] {
              generate_with_neighbors(*model.model, *bytes(), prompts, greedily(200), asked.find());
            }).substr(0, 66),
            "prompt 1 has 8 tokens; with 200 to generate that is beyond the mod");
}

}  // namespace
}  // namespace megatron
