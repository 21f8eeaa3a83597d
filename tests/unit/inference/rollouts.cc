#include "tests/unit/inference/rollouts.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/ssm/causal_conv.h"

namespace megatron {

at::Tensor losses_of(Model& model, const at::Tensor& tokens, const at::Tensor& labels,
                     const at::Tensor& document_ids) {
  ForwardContext context;
  context.training = true;
  const at::TensorOptions here = tokens.options().dtype(at::kLong);
  context.place.position = at::arange(tokens.size(1), here);
  context.place.sample = at::arange(tokens.size(0), here);
  context.document_ids = document_ids;
  if (document_ids.defined()) {
    const at::Tensor runs = document_runs(document_ids).t();
    context.position_ids = runs.unsqueeze(2).eq(runs.unsqueeze(1)).tril(-1).sum(2);
  }
  return model.token_losses(model.hidden(tokens, {}, context), labels).detach().contiguous();
}

namespace {

std::vector<DrivenSequence> wishes(uint32_t seed, const RolloutOptions& options) {
  std::mt19937 random(seed);
  std::vector<DrivenSequence> all =
      random_sequences(random, options.texts, options.longest_prompt, options.most_tokens);
  for (DrivenSequence& s : all) s.start.log_probabilities = {.output_top = 1, .prompt_top = 1};
  return all;
}

// Of each text, the losses of its tokens but the first one: one training forward over all of them.
std::vector<std::vector<float>> trained_losses(Model& model, const std::vector<DrivenSequence>& all,
                                               at::Device device) {
  std::vector<std::vector<int32_t>> texts;
  size_t longest = 0;
  for (const DrivenSequence& s : all) {
    texts.push_back(s.start.ids);
    const std::vector<int32_t> drawn = ids_of(s);
    texts.back().insert(texts.back().end(), drawn.begin(), drawn.end());
    longest = std::max(longest, texts.back().size());
  }
  const auto b = static_cast<int64_t>(all.size());
  const int64_t n = (static_cast<int64_t>(longest) + 2) / 4 * 4;  // for sequence parallelism
  const at::Tensor tokens = at::zeros({b, n}, at::kLong), labels = at::zeros({b, n}, at::kLong);
  for (int64_t i = 0; i < b; ++i) {
    const std::vector<int32_t>& text = texts[static_cast<size_t>(i)];
    for (size_t j = 0; j + 1 < text.size(); ++j) {
      tokens[i][static_cast<int64_t>(j)] = text[j];
      labels[i][static_cast<int64_t>(j)] = text[j + 1];
    }
  }
  const at::Tensor losses = losses_of(model, tokens.to(device), labels.to(device), {}).cpu();
  std::vector<std::vector<float>> of_texts;
  for (int64_t i = 0; i < b; ++i) {
    std::vector<float>& own = of_texts.emplace_back();
    for (size_t j = 0; j + 1 < texts[static_cast<size_t>(i)].size(); ++j)
      own.push_back(losses.data_ptr<float>()[static_cast<int64_t>(j) * b + i]);
  }
  return of_texts;
}

// Adapters begin with no output; these have one, the same on every rank.
void draw_adapters(Model& model) {
  int64_t seed = 1;
  model.visit([&](const std::string& name, Parameter& parameter) {
    if (!is_lora_parameter(name)) return;
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed++));
    parameter.value.copy_(at::empty(parameter.value.sizes(), at::kFloat).normal_(0.0, 0.3, random));
  });
}

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

}  // namespace

Compared rollouts(const ModelConfig& config, const RolloutOptions& options) {
  Compared of_first;
  run_ranks(options.tensor, [&](const std::shared_ptr<Backend>& world) {
    const Compared own = rollouts_of_rank(config, options, world);
    if (world->rank() == 0) of_first = own;
  });
  return of_first;
}

Compared rollouts_of_rank(const ModelConfig& config, const RolloutOptions& options,
                          const std::shared_ptr<Backend>& world) {
  Compared compared;
  const auto texts = static_cast<int64_t>(options.texts);
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = options.tensor;
  const ParallelGroups groups = make_parallel_groups(parallel, world);
  const auto ordered = ordered_reductions(groups.tp, options.device);
  Served served(Served::make(config, groups), {}, options.type, options.device);
  ModelConfig training = config;
  training.sequence_parallel = options.tensor > 1;
  Served trained(Served::make(training, groups), {}, options.type, options.device);
  draw_adapters(*served.model);
  draw_adapters(*trained.model);
  for (int seed = options.first_schedule; seed < options.first_schedule + options.schedules;
       ++seed) {
    std::vector<DrivenSequence> sequences = wishes(static_cast<uint32_t>(seed), options);
    const bool has_states = config.transformer.is_hybrid();
    DriverChances chances{.whole_prompts = 0.3,
                          .preempt = 0.3,
                          .share = has_states ? 0.0 : 0.8,
                          .pause = 0.2,
                          .in_flight = 1 + seed % 3};
    const auto serve = [&](std::vector<DrivenSequence>& of) {
      RunnerOptions own = options.runner;
      own.device_blocks += options.more_blocks * (seed % 5);
      own.keeping.drafts = chances.most_drafts;
      ModelRunner runner(*served.model, *served.weights, own);
      const int64_t accepted = drive_ranks(groups.world, runner, chances,
                                           static_cast<uint32_t>(seed), of, options.device);
      if (world->rank() == 0) {
        compared.graph_steps += runner.graph_steps();
        compared.divided_steps += runner.divided_steps();
      }
      return accepted;
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
    at::Tensor drawn = at::zeros({texts, options.most_tokens}, at::kLong);
    for (size_t i = 0; i < sequences.size(); ++i)
      for (size_t j = 0; world->rank() == 0 && j < sequences[i].drawn.size(); ++j)
        drawn[static_cast<int64_t>(i)][static_cast<int64_t>(j)] = sequences[i].drawn[j].id;
    const at::Tensor everywhere = drawn.to(options.device);
    groups.world.broadcast(everywhere, 0)->wait();
    drawn = everywhere.cpu();
    for (size_t i = 0; world->rank() != 0 && i < sequences.size(); ++i) {
      sequences[i].drawn.clear();
      const at::Tensor own = drawn[static_cast<int64_t>(i)];
      for (int64_t j = 0; j < sequences[i].tokens; ++j)
        sequences[i].drawn.push_back({0, static_cast<int32_t>(own[j].item<int64_t>()), true, {}});
    }
    const auto losses = trained_losses(*trained.model, sequences, options.device);
    if (world->rank() == 0) compare(sequences, losses, compared);
  }
  return compared;
}

}  // namespace megatron
