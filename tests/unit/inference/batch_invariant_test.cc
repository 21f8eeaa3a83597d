// Batch-invariant mode: what the engine reports of its tokens has the bits of the loss of a
// training forward over the same texts, whatever shared their steps.
#include "megatron/transformer/config/batch_invariant.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/ssm/causal_conv.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

class BatchInvariantScope {
 public:
  explicit BatchInvariantScope(bool on) { set_batch_invariant(on); }
  ~BatchInvariantScope() { set_batch_invariant(false); }
};

// Rows of sizes that fill no vector, chunks that texts end in the middle of; two tensor ranks share
// a group of B and C, over which the norm goes.
ModelConfig mamba_model() {
  ModelConfig config = hybrid_served_model("M*M-");
  TransformerConfig& t = config.transformer;
  t.mamba_num_heads = 6;
  t.mamba_head_dim = 3;
  t.mamba_num_groups = 1;
  t.mamba_state_dim = 10;
  t.mamba_chunk_size = 10;
  t.attention_dropout = t.hidden_dropout = 0.0;
  return config;
}

ModelConfig delta_net_model() {
  ModelConfig config = hybrid_served_model("GE*G");
  TransformerConfig& t = config.transformer;
  t.linear_num_value_heads = 6;
  t.linear_key_head_dim = 5;
  t.linear_value_head_dim = 7;
  t.linear_chunk_size = 11;
  t.num_experts = 4;
  t.moe_router_topk = 2;
  t.attention_dropout = t.hidden_dropout = 0.0;
  return config;
}

std::vector<std::pair<std::string, ModelConfig>> models() {
  ModelConfig llama = small_served_model();
  llama.transformer.hidden_size = 96;
  ModelConfig gpt = small_served_model();
  gpt.transformer.group_query_attention = false;
  gpt.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  gpt.transformer.max_position_embeddings = 64;
  gpt.transformer.normalization = Normalization::kLayerNorm;
  gpt.transformer.swiglu = false;
  gpt.transformer.add_bias_linear = true;
  ModelConfig gemma = small_served_model();
  gemma.transformer.window_size = {5, 0};
  gemma.transformer.window_attn_skip_freq = "2";
  gemma.transformer.attn_logit_softcapping = 3.0;
  gemma.transformer.final_logit_softcapping = 5.0;
  gemma.transformer.qk_layernorm = true;
  ModelConfig mixtral = small_served_model();
  mixtral.transformer.num_experts = 4;
  mixtral.transformer.moe_router_topk = 2;
  mixtral.transformer.moe_router_pre_softmax = true;
  const ModelConfig deepseek = latent_served_model();
  ModelConfig adapted = llama;
  adapted.transformer.lora_rank = 24;
  std::vector<std::pair<std::string, ModelConfig>> all = {
      {"llama", llama},     {"gpt", gpt},           {"gemma", gemma},
      {"mixtral", mixtral}, {"deepseek", deepseek}, {"adapters", adapted}};
  for (auto& [name, config] : all)
    config.transformer.attention_dropout = config.transformer.hidden_dropout = 0.0;
  return all;
}

std::vector<DrivenSequence> wishes(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::vector<DrivenSequence> all = random_sequences(random, count);
  for (DrivenSequence& s : all) s.start.log_probabilities = {.output_top = 1, .prompt_top = 1};
  return all;
}

// Of a training forward: tokens and labels [b, s] -> [s, b]. Documents count their own positions.
at::Tensor losses_of(Model& model, const at::Tensor& tokens, const at::Tensor& labels,
                     const at::Tensor& document_ids) {
  ForwardContext context;
  context.training = true;
  context.place.position = at::arange(tokens.size(1), at::kLong);
  context.place.sample = at::arange(tokens.size(0), at::kLong);
  context.document_ids = document_ids;
  if (document_ids.defined()) {
    const at::Tensor runs = document_runs(document_ids).t();
    context.position_ids = runs.unsqueeze(2).eq(runs.unsqueeze(1)).tril(-1).sum(2);
  }
  return model.token_losses(model.hidden(tokens, {}, context), labels).detach().contiguous();
}

// Of each text, the losses of its tokens but the first one: one training forward over all of them.
std::vector<std::vector<float>> trained_losses(Model& model,
                                               const std::vector<DrivenSequence>& all) {
  std::vector<std::vector<int32_t>> texts;
  size_t longest = 0;
  for (const DrivenSequence& s : all) {
    texts.push_back(s.start.ids);
    const std::vector<int32_t> drawn = ids_of(s);
    texts.back().insert(texts.back().end(), drawn.begin(), drawn.end());
    longest = std::max(longest, texts.back().size());
  }
  const auto b = static_cast<int64_t>(all.size());
  const int64_t n = static_cast<int64_t>(longest) / 2 * 2;  // sequence parallelism divides it
  const at::Tensor tokens = at::zeros({b, n}, at::kLong), labels = at::zeros({b, n}, at::kLong);
  for (int64_t i = 0; i < b; ++i) {
    const std::vector<int32_t>& text = texts[static_cast<size_t>(i)];
    for (size_t j = 0; j + 1 < text.size(); ++j) {
      tokens[i][static_cast<int64_t>(j)] = text[j];
      labels[i][static_cast<int64_t>(j)] = text[j + 1];
    }
  }
  const at::Tensor losses = losses_of(model, tokens, labels, {});
  std::vector<std::vector<float>> of_texts;
  for (int64_t i = 0; i < b; ++i) {
    std::vector<float>& own = of_texts.emplace_back();
    for (size_t j = 0; j + 1 < texts[static_cast<size_t>(i)].size(); ++j)
      own.push_back(losses[static_cast<int64_t>(j)][i].item<float>());
  }
  return of_texts;
}

// Adapters begin with no output; these have one, the same on every rank.
void draw_adapters(Model& model) {
  int64_t seed = 1;
  model.visit([&](const std::string& name, Parameter& parameter) {
    if (!is_lora_parameter(name)) return;
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed++));
    parameter.value.normal_(0.0, 0.3, random);
  });
}

struct Compared {
  int64_t texts = 0, numbers = 0, different = 0, accepted = 0;
};

// Tokens and numbers, in every bit.
bool equal(const std::vector<DrivenSequence>& a, const std::vector<DrivenSequence>& b) {
  const auto same = [](const DrawnToken& x, const DrawnToken& y) {
    return x.id == y.id && x.log_probabilities == y.log_probabilities;
  };
  return std::ranges::equal(a, b, [&](const DrivenSequence& x, const DrivenSequence& y) {
    return std::ranges::equal(x.drawn, y.drawn, same) && x.scores == y.scores;
  });
}

void compare(const std::vector<DrivenSequence>& served,
             const std::vector<std::vector<float>>& losses, Compared& so_far) {
  for (size_t i = 0; i < served.size(); ++i) {
    std::vector<float> told;
    for (const PositionLogProbabilities& of : served[i].scores)
      told.push_back(of.chosen.log_probability);
    for (const DrawnToken& drawn : served[i].drawn)
      told.push_back(drawn.log_probabilities->chosen.log_probability);
    ASSERT_EQ(told.size(), losses[i].size());
    for (size_t j = 0; j < told.size(); ++j) so_far.different += told[j] != -losses[i][j];
    so_far.numbers += static_cast<int64_t>(told.size());
    ++so_far.texts;
  }
}

// Rollouts by ranks as threads: chunks of prompts, prefixes that are shared, preemption by both
// ways, steps in flight; then the forward of the trainer on the same ranks.
Compared rollouts(const ModelConfig& config, int tensor, int schedules) {
  Compared compared;
  run_ranks(tensor, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    Served served(Served::make(config, groups), {}, at::kFloat);
    ModelConfig training = config;
    training.sequence_parallel = tensor > 1;
    Served trained(Served::make(training, groups), {}, at::kFloat);
    draw_adapters(*served.model);
    draw_adapters(*trained.model);
    for (int seed = 0; seed < schedules; ++seed) {
      std::vector<DrivenSequence> sequences = wishes(static_cast<uint32_t>(seed), 42);
      const bool has_states = config.transformer.is_hybrid();
      DriverChances chances{.whole_prompts = 0.3,
                            .preempt = 0.3,
                            .share = has_states ? 0.0 : 0.8,
                            .pause = 0.2,
                            .in_flight = 1 + seed % 3};
      const auto serve = [&](std::vector<DrivenSequence>& texts) {
        RunnerOptions options = small_runner(9 + 4 * (seed % 5));
        options.keeping.drafts = chances.most_drafts;
        ModelRunner runner(*served.model, *served.weights, options);
        return drive_ranks(groups.world, runner, chances, static_cast<uint32_t>(seed), texts);
      };
      const std::vector<DrivenSequence> given = sequences;
      serve(sequences);
      // With drafts of its tokens, some of them wrong, each gets the same.
      std::vector<DrivenSequence> drafted = given;
      chances.drafts = &sequences;
      chances.in_flight = 1 + (seed + 1) % 3;
      const int64_t accepted = serve(drafted);
      if (world->rank() == 0) {
        compared.accepted += accepted;
        compared.different += equal(sequences, drafted) ? 0 : 1;
      }
      // Other ranks learn what was drawn.
      at::Tensor drawn = at::zeros({42, 10}, at::kLong);
      for (size_t i = 0; i < sequences.size(); ++i)
        for (size_t j = 0; world->rank() == 0 && j < sequences[i].drawn.size(); ++j)
          drawn[static_cast<int64_t>(i)][static_cast<int64_t>(j)] = sequences[i].drawn[j].id;
      groups.world.broadcast(drawn, 0)->wait();
      for (size_t i = 0; world->rank() != 0 && i < sequences.size(); ++i) {
        sequences[i].drawn.clear();
        const at::Tensor own = drawn[static_cast<int64_t>(i)];
        for (int64_t j = 0; j < sequences[i].tokens; ++j)
          sequences[i].drawn.push_back({0, static_cast<int32_t>(own[j].item<int64_t>()), true, {}});
      }
      const auto losses = trained_losses(*trained.model, sequences);
      if (world->rank() == 0) compare(sequences, losses, compared);
    }
  });
  return compared;
}

TEST(BatchInvariant, RolloutsHaveTheTrainersLogProbabilitiesInEveryBit) {
  const BatchInvariantScope mode(true);
  for (const auto& [name, config] : models())
    for (const int tensor : {1, 2}) {
      const Compared compared = rollouts(config, tensor, 2);
      EXPECT_EQ(compared.different, 0) << name << ", " << tensor << " ranks";
      EXPECT_EQ(compared.texts, 84);
      EXPECT_GT(compared.accepted, 50);
      EXPECT_GT(compared.numbers, 750);
    }
}

TEST(BatchInvariant, RolloutsOfModelsWithStatesHaveThemToo) {
  const BatchInvariantScope mode(true);
  for (const ModelConfig& config : {mamba_model(), delta_net_model()})
    for (const int tensor : {1, 2}) {
      const Compared compared = rollouts(config, tensor, 2);
      EXPECT_EQ(compared.different, 0) << config.transformer.hybrid_layer_pattern << tensor;
      EXPECT_EQ(compared.texts, 84);
      EXPECT_GT(compared.accepted, 50);
      EXPECT_GT(compared.numbers, 700);
    }
}

// The losses of texts that a training forward has packed are those of each alone.
TEST(BatchInvariant, PackedDocumentsHaveTheLossesOfEachAlone) {
  const BatchInvariantScope mode(true);
  const ParallelGroups one;
  for (const ModelConfig& config : {mamba_model(), delta_net_model()}) {
    Served trained(Served::make(config, one), {}, at::kFloat);
    std::mt19937 random(4);
    const std::vector<std::vector<int64_t>> lengths = {{7, 1, 20, 9}, {2, 22, 13}};
    const at::Tensor tokens = at::zeros({2, 37}, at::kLong), ids = at::zeros({2, 37}, at::kLong),
                     labels = at::randint(kToyVocab, {2, 37}, at::kLong);
    std::vector<at::Tensor> alone[2];
    for (int64_t i = 0; i < 2; ++i) {
      int64_t first = 0;
      for (const int64_t length : lengths[static_cast<size_t>(i)]) {
        const std::vector<int32_t> drawn = random_ids(random, length);
        for (int64_t j = 0; j < length; ++j) tokens[i][first + j] = drawn[static_cast<size_t>(j)];
        ids[i].narrow(0, first, length).fill_(first);
        alone[i].push_back(losses_of(*trained.model,
                                     tokens[i].narrow(0, first, length).unsqueeze(0),
                                     labels[i].narrow(0, first, length).unsqueeze(0), {}));
        first += length;
      }
    }
    const at::Tensor packed = losses_of(*trained.model, tokens, labels, ids);
    for (int64_t i = 0; i < 2; ++i)
      EXPECT_TRUE(at::equal(packed.select(1, i), at::cat(alone[i]).select(1, 0)));
  }
}

TEST(BatchInvariant, AdaptersOfLatentAttentionAreRefused) {
  for (const auto& [name, config] : models()) {
    TransformerConfig adapted = config.transformer;
    adapted.lora_rank = 4;
    const std::string error =
        error_of([&] { check_batch_invariant(adapted, at::kCPU, at::kFloat); });
    EXPECT_EQ(error.find("with adapters beside --multi-latent-attention is not built") !=
                  std::string::npos,
              name == "deepseek")
        << name << error;
  }
}

// What the rollouts rule out.
TEST(BatchInvariant, WithoutTheModeSomeDiffer) {
  for (const ModelConfig& config : {models()[0].second, mamba_model()})
    EXPECT_GT(rollouts(config, 1, 1).different, 20);
}

}  // namespace
}  // namespace megatron
