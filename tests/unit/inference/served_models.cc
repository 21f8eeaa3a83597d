#include "tests/unit/inference/served_models.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/generator.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"

namespace megatron {

ModelConfig small_served_model() {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = 2;
  t.hidden_size = 32;
  t.num_attention_heads = 4;
  t.group_query_attention = true;
  t.num_query_groups = 2;
  t.seq_length = 64;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.swiglu = true;
  t.add_bias_linear = false;
  t.init_method_std = 0.4;
  config.vocab_size = kToyVocab;
  config.padded_vocab_size = 64;
  return config;
}

ModelConfig latent_served_model() {
  ModelConfig config = small_served_model();
  TransformerConfig& t = config.transformer;
  t.group_query_attention = false;
  t.multi_latent_attention = true;
  t.kv_lora_rank = 12;
  t.q_lora_rank = 10;
  t.qk_head_dim = 8;
  t.qk_pos_emb_head_dim = 4;
  t.v_head_dim = 6;
  t.qk_layernorm = true;
  return config;
}

ModelConfig hybrid_served_model(const std::string& pattern) {
  ModelConfig config = small_served_model();
  TransformerConfig& t = config.transformer;
  t.hybrid_layer_pattern = pattern;
  t.num_layers = 0;
  t.mamba_num_heads = 4;
  t.mamba_head_dim = 4;
  t.mamba_state_dim = 6;
  t.mamba_num_groups = 2;
  t.mamba_chunk_size = 4;
  t.linear_num_key_heads = 2;
  t.linear_num_value_heads = 4;
  t.linear_key_head_dim = 4;
  t.linear_value_head_dim = 6;
  t.finalize();
  return config;
}

Served::Served(std::unique_ptr<Model> made, WeightReader read, at::ScalarType type,
               at::Device device)
    : model(std::move(made)), store(*model, type, device) {
  at::set_num_threads(1);
  initialize_parameters(*model, 5, model->groups());
  store.place();
  weights.emplace(store, std::move(read), "first");
}

std::unique_ptr<Model> Served::make(ModelConfig config, const ParallelGroups& groups) {
  config.transformer.finalize();
  return make_model(config, groups, served_slice(config, groups.pp.rank(), groups.pp.size()));
}

LoadModelRequest golden_model(const std::string& base, const std::filesystem::path& adapter) {
  LoadModelRequest request;
  request.load = MEGATRON_SOURCE_DIR "/tests/golden/hf/" + base;
  request.adapter = adapter;
  request.dtype = at::kDouble;
  return request;
}

std::filesystem::path golden_adapter(const std::string& name) {
  return MEGATRON_SOURCE_DIR "/tests/golden/lora/" + name;
}

std::filesystem::path stronger_than(const std::filesystem::path& adapter) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / cat("stronger_adapter.", getpid());
  std::filesystem::remove_all(folder);
  std::filesystem::copy(adapter, folder);
  std::string config = read_file(folder / "adapter_config.json");
  const size_t at = config.find("\"lora_alpha\": ") + 14;
  config.replace(at, config.find(',', at) - at, "150");
  std::ofstream(folder / "adapter_config.json") << config;
  return folder;
}

RunnerOptions small_runner(int32_t blocks) {
  RunnerOptions options;
  options.slots = 4;
  options.block_size = 4;
  options.device_blocks = blocks;
  options.host_blocks = 24;
  options.host_states = 3;
  options.most_rows = 64;
  return options;
}

std::vector<int32_t> random_ids(std::mt19937& random, int64_t count) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i)
    ids.push_back(std::uniform_int_distribution<int32_t>(0, kToyVocab - 1)(random));
  return ids;
}

std::vector<DrivenSequence> random_sequences(std::mt19937& random, size_t count,
                                             int64_t longest_prompt, int64_t most_tokens) {
  std::vector<DrivenSequence> all;
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (size_t i = 0; i < count; ++i) {
    DrivenSequence s;
    s.start.ids = i % 3 == 2 ? all.back().start.ids : random_ids(random, number(1, longest_prompt));
    s.start.request = RequestId{i + 1};
    s.start.choice = static_cast<int32_t>(i % 2);
    s.tokens = number(1, most_tokens);
    SamplingParameters& p = s.start.sampling;
    p.seed = static_cast<uint64_t>(number(1, 5));
    p.temperature = i % 2 == 0 ? 0.0 : 1.3;
    if (i % 4 == 1) p.top_k = 20;
    if (i % 4 == 3) p.top_p = 0.8;
    if (i % 5 == 0) p.presence_penalty = p.frequency_penalty = 0.4;
    if (i % 5 == 1) p.repetition_penalty = 1.2;
    if (i % 5 == 2) p.logit_bias = {{3, 2.0f}};
    s.start.min_tokens = 2;
    s.start.ends = {0, 1, 2, 7};
    LogProbabilityWishes& wishes = s.start.log_probabilities;
    if (i % 3 == 0) wishes.output_top = static_cast<int32_t>(i % 4);
    wishes.processed = i % 2 == 1;
    if (i % 4 == 2) wishes.prompt_top = 2;
    // Numbers that tell of each id that penalties count.
    if (i % 5 < 2) {
      wishes.output_top = std::max(wishes.output_top, 0);
      wishes.processed = true;
    }
    all.push_back(std::move(s));
  }
  return all;
}

DrivenSequence alone(const DrivenSequence& given, const LogitsOf& logits_of, int64_t vocab_size) {
  DrivenSequence s = given;
  const int64_t rows = s.start.rows ? s.start.rows->count : 0;
  s.start.slot = 0;
  s.start.prompt_length = rows + static_cast<int64_t>(s.start.ids.size());
  TokenSampler sampler(vocab_size, vocab_size, {}, at::kCPU);
  sampler.start(s.start);
  std::vector<int32_t> ids = s.start.ids;
  const LogProbabilityReport prompt({s.start.log_probabilities.prompt_top});
  for (int64_t i = 0; i < s.tokens; ++i) {
    const at::Tensor logits = logits_of(ids);
    for (int64_t j = rows == 0 ? 1 : 0; i == 0 && s.start.log_probabilities.prompt_top >= 0 &&
                                        j < static_cast<int64_t>(ids.size());
         ++j) {
      const int32_t target = ids[static_cast<size_t>(j)];
      const at::Tensor numbers =
          sampler.score(logits.narrow(0, rows + j - 1, 1), {target}, prompt.most());
      s.scores.push_back(prompt.read(numbers.const_data_ptr<double>(), 0, target));
    }
    const DrawReport report({0}, {s.start.log_probabilities});
    const auto draws = sampler.draw(
        logits.narrow(0, logits.size(0) - 1, 1),
        std::vector<TokenSampler::Row>{{0, rows + static_cast<int64_t>(ids.size())}}, report);
    s.drawn.push_back(report.read(draws.report().const_data_ptr<double>())[0]);
    ids.push_back(s.drawn.back().id);
  }
  return s;
}

std::vector<int32_t> ids_of(const DrivenSequence& s) {
  std::vector<int32_t> ids;
  for (const DrawnToken& drawn : s.drawn) ids.push_back(drawn.id);
  return ids;
}

namespace {
void expect_near(const PositionLogProbabilities& a, const PositionLogProbabilities& b) {
  EXPECT_EQ(a.chosen.id, b.chosen.id);
  EXPECT_NEAR(a.chosen.log_probability, b.chosen.log_probability, 1e-5);
  ASSERT_EQ(a.top.size(), b.top.size());
  for (size_t i = 0; i < a.top.size(); ++i) {
    EXPECT_EQ(a.top[i].id, b.top[i].id);
    EXPECT_NEAR(a.top[i].log_probability, b.top[i].log_probability, 1e-5);
  }
}
}  // namespace

void expect_equal(const std::vector<DrivenSequence>& got, const std::vector<DrivenSequence>& want,
                  const std::string& where) {
  SCOPED_TRACE(where);
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE("sequence " + std::to_string(i));
    EXPECT_EQ(ids_of(got[i]), ids_of(want[i]));
    ASSERT_EQ(got[i].scores.size(), want[i].scores.size());
    for (size_t j = 0; j < got[i].scores.size(); ++j)
      expect_near(got[i].scores[j], want[i].scores[j]);
    for (size_t j = 0; j < got[i].drawn.size() && j < want[i].drawn.size(); ++j) {
      const auto &a = got[i].drawn[j].log_probabilities, &b = want[i].drawn[j].log_probabilities;
      ASSERT_EQ(a.has_value(), b.has_value());
      if (a) expect_near(*a, *b);
    }
  }
}

std::vector<DrivenSequence> all_alone(Model& model, const std::vector<DrivenSequence>& given) {
  std::vector<DrivenSequence> expected;
  for (const DrivenSequence& s : given)
    expected.push_back(
        alone(s, [&](const std::vector<int32_t>& ids) { return full_logits(model, ids); }));
  return expected;
}

}  // namespace megatron
