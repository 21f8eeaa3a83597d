// Weights of a model that is served: exchanged in place, suspended at every level, in FP8 and int8;
// and adapters of single rows.
#include "megatron/inference/served_weights.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/generator.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// Weights drawn from another seed, in host memory.
std::vector<at::Tensor> other_weights(const ModelConfig& config, int64_t seed,
                                      at::ScalarType type) {
  const ParallelGroups one;
  const std::unique_ptr<Model> model = Served::make(config, one);
  const PlainParameterStore store(*model, type, at::kCPU, false);
  initialize_parameters(*model, seed, one);
  std::vector<at::Tensor> values;
  for (Parameter* parameter : model->parameters()) values.push_back(parameter->value);
  return values;
}

WeightReader reader(const ModelConfig& config, at::ScalarType type = at::kDouble) {
  return [=](const std::string& source) {
    MEGATRON_CHECK(source != "broken", "broken: there is no such folder");
    return other_weights(config, source == "first" ? 5 : 6, type);
  };
}

at::Tensor logits_of(Served& served) {
  return full_logits(*served.model, std::vector<int32_t>{3, 1, 4, 1, 5});
}

TEST(ServedWeights, AreExchangedInPlaceOrNotAtAll) {
  const ModelConfig config = small_served_model();
  const ParallelGroups one;
  Served served(Served::make(config, one), reader(config));
  ServedWeights& weights = *served.weights;
  const at::Tensor before = logits_of(served);
  const void* memory = served.model->parameters()[3]->value.data_ptr();
  EXPECT_EQ(weights.staged(0), "no weights are being read");
  weights.stage("broken");
  while (!weights.staged(1'000'000)) {
  }
  EXPECT_EQ(error_of([&] { weights.commit(1); }),
            "no weights were read to be exchanged for the current ones");
  weights.stage("broken");
  std::optional<std::string> outcome;
  while (!(outcome = weights.staged(1'000'000))) {
  }
  EXPECT_EQ(*outcome, "broken: there is no such folder");
  weights.stage("second");
  while (!(outcome = weights.staged(1'000'000))) {
  }
  EXPECT_EQ(*outcome, "");
  EXPECT_EQ(weights.staged(0), "") << "asked again";
  EXPECT_TRUE(at::equal(logits_of(served), before)) << "staged, not yet current";
  weights.discard();
  EXPECT_NE(error_of([&] { weights.commit(1); }), "");
  weights.stage("second");
  while (!weights.staged(1'000'000)) {
  }
  weights.commit(7);
  EXPECT_EQ(weights.version(), 7);
  Served other(Served::make(config, one));
  initialize_parameters(*other.model, 6, one);
  EXPECT_TRUE(at::equal(logits_of(served), logits_of(other)));
  EXPECT_EQ(served.model->parameters()[3]->value.data_ptr(), memory);
}

TEST(ServedWeights, TellBeforeTheyMove) {
  const ModelConfig config = small_served_model();
  const ParallelGroups one;
  Served served(Served::make(config, one), reader(config));
  ServedWeights& weights = *served.weights;
  const int64_t all = served.store.bytes();
  std::vector<int64_t> seen;  // what was there then
  weights.before_moves([&] { seen.push_back(served.store.bytes()); });
  const auto read = [&] {
    weights.stage("second");
    while (!weights.staged(1'000'000)) {
    }
  };
  weights.suspend(MemoryLevel::kKeep);
  read();
  EXPECT_TRUE(seen.empty());
  weights.commit(1);
  EXPECT_EQ(seen, std::vector<int64_t>(1, all));
  weights.suspend(MemoryLevel::kOffload);
  EXPECT_EQ(seen, std::vector<int64_t>(2, all));
  read();
  weights.commit(2);
  weights.resume();
  EXPECT_EQ(seen.size(), 2U) << "nothing was there that could have moved";
  weights.before_moves({});
  weights.suspend(MemoryLevel::kDrop);
  EXPECT_EQ(seen.size(), 2U);
}

TEST(ServedWeights, WaitInHostMemoryOrAreReadAgain) {
  const ModelConfig config = small_served_model();
  const ParallelGroups one;
  Served served(Served::make(config, one), reader(config));
  ServedWeights& weights = *served.weights;
  const at::Tensor before = logits_of(served);
  const int64_t bytes = served.store.bytes();
  EXPECT_GT(bytes, 10000);
  for (const MemoryLevel level : {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop}) {
    weights.suspend(level);
    EXPECT_EQ(served.store.bytes(), level == MemoryLevel::kKeep ? bytes : 0);
    weights.resume();
    EXPECT_EQ(served.store.bytes(), bytes);
    EXPECT_TRUE(at::equal(logits_of(served), before));
  }
  // Exchanged meanwhile
  Served other(Served::make(config, one));
  initialize_parameters(*other.model, 6, one);
  for (const MemoryLevel level : {MemoryLevel::kOffload, MemoryLevel::kDrop}) {
    weights.suspend(level);
    weights.stage(level == MemoryLevel::kDrop ? "first" : "second");
    while (!weights.staged(1'000'000)) {
    }
    weights.commit(level == MemoryLevel::kDrop ? 2 : 1);
    weights.resume();
    EXPECT_TRUE(
        at::equal(logits_of(served), level == MemoryLevel::kDrop ? before : logits_of(other)));
  }
  Served nowhere(Served::make(config, one));
  ServedWeights unnamed(nowhere.store, reader(config), "");
  EXPECT_EQ(error_of([&] { unnamed.suspend(MemoryLevel::kDrop); }),
            "weights that came from no folder cannot be read again\n"
            "hint: suspend with the weights kept or offloaded");
  EXPECT_TRUE(at::equal(logits_of(nowhere), before)) << "nothing was done";
}

ModelConfig fp8_model(Fp8Recipe recipe) {
  ModelConfig config = small_served_model();
  TransformerConfig& t = config.transformer;
  t.hidden_size = 128;
  t.ffn_hidden_size = 256;
  t.kv_channels = 32;
  t.num_query_groups = 4;
  t.fp8_format = Fp8Format::kE4M3;
  t.fp8_recipe = recipe;
  t.init_method_std = 0.1;
  return config;
}

// Linears of a served model hold one byte per weight; they compute what the trainer's compute, with
// one scale for a tensor but for the rounding of inputs, whose rows have scales of their own.
TEST(ServedWeights, InFp8AreHeldOnceAndMultiplyAsInTraining) {
  const at::NoGradGuard no_grad;
  for (const Fp8Recipe recipe : {Fp8Recipe::kTensorwise, Fp8Recipe::kBlockwise}) {
    const ModelConfig config = fp8_model(recipe);
    const ParallelGroups one;
    Served served(Served::make(config, one), reader(config, at::kFloat), at::kFloat);
    const std::unique_ptr<Model> plain = Served::make(config, one);
    const PlainParameterStore store(*plain, at::kFloat, at::kCPU, false);
    initialize_parameters(*plain, 5, one);
    std::mt19937 random(1);
    const std::vector<int32_t> whole = random_ids(random, 128);
    const auto expect_trained = [&](const at::Tensor& logits, const at::Tensor& trained) {
      const double apart = at::linalg_vector_norm(logits - trained).item<double>() /
                           at::linalg_vector_norm(trained).item<double>();
      EXPECT_LE(apart, recipe == Fp8Recipe::kBlockwise ? 0.0 : 0.25);
    };
    const at::Tensor expected = full_logits(*served.model, whole);
    expect_trained(expected, full_logits(*plain, whole));
    int64_t linears = 0, others = 0;
    served.model->visit([&](const std::string&, Parameter& parameter) {
      const int64_t count = parameter.local_shape.size() == 2
                                ? parameter.local_shape[0] * parameter.local_shape[1]
                                : parameter.local_shape[0];
      (parameter.quantization != QuantizationRecipe::kNone ? linears : others) += count;
    });
    EXPECT_GT(linears, 4 * others);
    EXPECT_LT(served.store.bytes(), 4 * others + linears + linears / 50 + 2048);
    // Any number of rows: what is added to complete the tiles is not seen.
    for (const size_t rows : {1, 5, 17}) {
      const std::vector<int32_t> some(whole.begin(),
                                      whole.begin() + static_cast<std::ptrdiff_t>(rows));
      const at::Tensor logits = full_logits(*served.model, some);
      EXPECT_EQ(logits.size(0), static_cast<int64_t>(rows));
      if (recipe == Fp8Recipe::kBlockwise) {
        EXPECT_LT(
            (logits - expected.narrow(0, 0, static_cast<int64_t>(rows))).abs().max().item<double>(),
            1e-4)
            << "scales of rows by themselves";
      }
    }
    const auto check = [&](const at::Tensor& wanted, const char* when) {
      EXPECT_TRUE(at::equal(full_logits(*served.model, whole), wanted)) << when;
    };
    served.weights->suspend(MemoryLevel::kOffload);
    EXPECT_EQ(served.store.bytes(), 0);
    served.weights->resume();
    check(expected, "offloaded and back");
    served.weights->suspend(MemoryLevel::kDrop);
    served.weights->resume();
    check(expected, "read again");
    served.weights->stage("second");
    while (!served.weights->staged(1'000'000)) {
    }
    served.weights->commit(1);
    initialize_parameters(*plain, 6, one);
    expect_trained(full_logits(*served.model, whole), full_logits(*plain, whole));
    EXPECT_FALSE(at::equal(full_logits(*served.model, whole), expected)) << "exchanged";
  }
}

TEST(ServedWeights, InFp8DecodeAsTheWholeSequence) {
  const ModelConfig config = fp8_model(Fp8Recipe::kBlockwise);
  const ParallelGroups one;
  Served served(Served::make(config, one), {}, at::kFloat);
  std::mt19937 random(3);
  std::vector<DrivenSequence> given = random_sequences(random, 4);
  for (DrivenSequence& s : given) s.start.sampling.temperature = 0.0;
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  ModelRunner runner(*served.model, *served.weights, small_runner(20));
  PlanDriver(runner, {.whole_prompts = 0.5}, 3).run(given);
  for (size_t i = 0; i < given.size(); ++i) EXPECT_EQ(ids_of(given[i]), ids_of(expected[i])) << i;
}

TEST(ServedWeights, InInt8AreHeldOnceAndMultiplyAlone) {
  for (const bool tied : {false, true}) {
    ModelConfig config = small_served_model();
    config.transformer.untie_embeddings_and_output_weights = !tied;
    const ParallelGroups one;
    Served served(Served::make(config, one), reader(config, at::kFloat), at::kFloat);
    const std::vector<int32_t> ids = {3, 1, 4, 1, 5, 9, 2, 6};
    const at::Tensor in_floats = full_logits(*served.model, ids);
    int64_t planned = 0;
    for (const Parameter* parameter : served.model->parameters())
      planned += int8_store_bytes(*parameter, 4, true);
    served.store.use_int8();
    const at::Tensor expected = full_logits(*served.model, ids);
    const double error = ((expected - in_floats).norm() / in_floats.norm()).item<double>();
    EXPECT_LT(error, 0.1);
    EXPECT_GT(error, 1e-4) << "computed in floats";
    EXPECT_EQ(served.store.bytes(), planned);
    const auto check = [&](const at::Tensor& wanted, const char* when) {
      EXPECT_TRUE(at::equal(full_logits(*served.model, ids), wanted)) << when;
    };
    for (const MemoryLevel level : {MemoryLevel::kOffload, MemoryLevel::kDrop}) {
      served.weights->suspend(level);
      EXPECT_EQ(served.store.bytes(), 0);
      served.weights->resume();
      check(expected, level == MemoryLevel::kDrop ? "read again" : "offloaded and back");
    }
    served.weights->stage("second");
    while (!served.weights->staged(1'000'000)) {
    }
    served.weights->commit(1);
    Served other(Served::make(config, one), {}, at::kFloat);
    initialize_parameters(*other.model, 6, one);
    other.store.use_int8();
    check(full_logits(*other.model, ids), "exchanged");
    // Of sequences in chunks and in any company
    std::mt19937 random(3);
    std::vector<DrivenSequence> given = random_sequences(random, 4);
    for (DrivenSequence& s : given) s.start.sampling.temperature = 0.0;
    const std::vector<DrivenSequence> alone = all_alone(*served.model, given);
    ModelRunner runner(*served.model, *served.weights, small_runner(20));
    runner.run_first_forward();
    PlanDriver(runner, {.whole_prompts = 0.5}, 3).run(given);
    for (size_t i = 0; i < given.size(); ++i) EXPECT_EQ(ids_of(given[i]), ids_of(alone[i])) << i;
  }
}

std::vector<DrivenSequence> adapted_sequences(int64_t vocab_size) {
  std::mt19937 random(8);
  std::vector<DrivenSequence> all;
  for (int32_t i = 0; i < 6; ++i) {
    DrivenSequence s;
    s.start.adapter = i % 3 - 1;
    s.start.ids =
        i < 3 || all.empty() ? random_ids(random, 9) : all[static_cast<size_t>(i - 3)].start.ids;
    for (int32_t& id : s.start.ids) id %= static_cast<int32_t>(vocab_size);
    if (i > 0 && i < 3) s.start.ids = all[0].start.ids;
    s.start.sampling.temperature = i < 3 ? 0.0 : 1.0;
    s.start.sampling.seed = 3;
    s.start.log_probabilities.output_top = 1;
    s.tokens = 8;
    all.push_back(std::move(s));
  }
  return all;
}

struct AdaptedModel {
  const char *base, *adapter;
};
void PrintTo(const AdaptedModel& model, std::ostream* out) { *out << model.adapter; }
class Adapters : public testing::TestWithParam<AdaptedModel> {};

TEST_P(Adapters, RowsOfOneBatchTakeTheirOwn) {
  const auto own_model = [&](const fs::path& adapter = {}) {
    return golden_model(GetParam().base, adapter);
  };
  const fs::path adapter = golden_adapter(GetParam().adapter), stronger = stronger_than(adapter);
  const ParallelGroups one;
  const LoadedModel base = load_model(own_model(), one);
  const std::vector<std::pair<std::string, fs::path>> folders = {{"all", adapter},
                                                                 {"stronger", stronger}};
  const AdapterList adapters = load_adapters(base, folders);
  const std::vector<DrivenSequence> given = adapted_sequences(base.config.vocab_size);
  const LoadedModel merged[] = {load_model(own_model(), one), load_model(own_model(adapter), one),
                                load_model(own_model(stronger), one)};
  std::vector<std::vector<float>> expected;
  std::vector<std::vector<int32_t>> ids;
  for (const DrivenSequence& s : given) {
    const DrivenSequence own = alone(s, [&](const std::vector<int32_t>& known) {
      return full_logits(*merged[s.start.adapter + 1].model, known);
    });
    ids.push_back(ids_of(own));
    expected.emplace_back();
    for (const DrawnToken& drawn : own.drawn)
      expected.back().push_back(drawn.log_probabilities->chosen.log_probability);
  }
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_NE(ids[1], ids[2]);
  const auto check = [&](const std::vector<DrivenSequence>& got, const std::string& where) {
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(ids_of(got[i]), ids[i]) << where << ", sequence " << i;
      for (size_t j = 0; j < got[i].drawn.size(); ++j)
        EXPECT_NEAR(got[i].drawn[j].log_probabilities->chosen.log_probability, expected[i][j],
                    1e-5);
    }
  };
  ServedWeights weights(*base.store, {}, "");
  RunnerOptions options = small_runner(24);
  options.adapters = &adapters;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    ModelRunner runner(*base.model, weights, options);
    EXPECT_EQ(runner.facts().num_adapters, 2);
    std::vector<DrivenSequence> got = given;
    PlanDriver(runner, {.whole_prompts = 0.5, .preempt = 0.2, .share = 0.5}, seed).run(got);
    check(got, cat("seed ", seed));
  }
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    const LoadedModel own = load_model(own_model(), groups);
    const AdapterList own_adapters = load_adapters(own, folders);
    ServedWeights own_weights(*own.store, {}, "");
    RunnerOptions own_options = small_runner(24);
    own_options.adapters = &own_adapters;
    ModelRunner runner(*own.model, own_weights, own_options);
    std::vector<DrivenSequence> got = given;
    drive_ranks(groups.world, runner, {.whole_prompts = 0.5}, 1, got);
    if (world->rank() == 0) check(got, "two ranks");
  });
}

INSTANTIATE_TEST_SUITE_P(Models, Adapters,
                         testing::Values(AdaptedModel{"llama2", "llama_all"},
                                         AdaptedModel{"qwen2_moe", "qwen2_moe_shared"}),
                         [](const auto& info) { return std::string(info.param.adapter); });

TEST(AdapterFolders, ThatDoNotFitAreRefusedByName) {
  const ParallelGroups one;
  const LoadedModel base = load_model(golden_model("llama2"), one);
  const auto refused = [&](const fs::path& folder) {
    return error_of([&] { load_adapters(base, {{"mine", folder}}); });
  };
  EXPECT_EQ(refused("/nowhere").substr(0, 14), "adapter mine: ");
  EXPECT_NE(refused(golden_adapter("qwen2_qv")), "");
  const LoadedModel adapted = load_model(golden_model("llama2", golden_adapter("llama_all")), one);
  EXPECT_NE(error_of([&] {
              load_adapters(adapted, {{"all", golden_adapter("llama_all")}});
            }).find("holds adapters already"),
            std::string::npos);
  const LoadedModel latents = load_model(golden_model("deepseek_v2_lite"), one);
  EXPECT_NE(error_of([&] {
              load_adapters(latents, {{"all", golden_adapter("deepseek_v2_lite_attention")}});
            }).find("cached latents meet one weight for all rows"),
            std::string::npos);
}

}  // namespace
}  // namespace megatron
