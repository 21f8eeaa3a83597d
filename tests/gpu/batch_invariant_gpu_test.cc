// Batch-invariant mode on a GPU: attention, products and whole rollouts have the bits of the
// trainer's forward, whatever shares their steps.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "megatron/base/format.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/graphs/decode_graphs.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/kernel_profile.h"
#include "megatron/tensor/batch_invariant/mode_scope.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "tests/gpu/timing.h"
#include "tests/kernels/cases.h"
#include "tests/unit/inference/rollouts.h"
#include "tests/unit/inference/served_schedules.h"

namespace megatron {
namespace {

const at::Device kInvariantGpu(at::kCUDA, 0);

struct OrderedShape {
  int64_t heads, groups, d, window;
  double cap;
};

void PrintTo(const OrderedShape& c, std::ostream* out) {
  *out << c.heads << "_" << c.groups << "_" << c.d << "_window" << c.window << "_cap" << c.cap;
}

class OrderedAttentionGpu : public testing::TestWithParam<OrderedShape> {
 protected:
  AttentionOptions options() const {
    AttentionOptions options;
    options.scale = 1.5 / std::sqrt(static_cast<double>(GetParam().d));
    options.window_left = GetParam().window;
    options.softcap = GetParam().cap;
    return options;
  }
};

// Three texts of one length are trained on; then each is read in chunks and decoded, in steps that
// it shares with the others.
TEST_P(OrderedAttentionGpu, TrainingChunksAndDecodingHaveTheSameBits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const OrderedShape c = GetParam();
  const BatchInvariantScope mode(true);
  constexpr int64_t kTexts = 3, kLength = 1100, kBlock = 32, kOfText = (kLength + 31) / 32;
  at::manual_seed(5);
  const int64_t r = c.heads / c.groups;
  const at::Tensor all = at::randn({kLength, kTexts, c.groups, r + 2, c.d}).to(at::kBFloat16);
  const auto queries = [&](at::Device device, at::ScalarType type) {
    return all.narrow(3, 0, r).reshape({kLength, kTexts, c.heads, c.d}).to(device, type);
  };
  const auto part = [&](int64_t which, at::Device device, at::ScalarType type) {
    return all.select(3, r + which).to(device, type);
  };
  const at::Tensor trained =
      core_attention(queries(kInvariantGpu, at::kBFloat16), part(0, kInvariantGpu, at::kBFloat16),
                     part(1, kInvariantGpu, at::kBFloat16), options());
  const at::Tensor exact =
      core_attention(queries(at::kCPU, at::kDouble), part(0, at::kCPU, at::kDouble),
                     part(1, at::kCPU, at::kDouble), options());
  EXPECT_LT(relative_error(trained.cpu(), exact), 1e-2);

  KVCache cache;
  std::mt19937 random(3);
  const std::vector<int64_t> lengths = {kLength, 700, 33};
  std::vector<int64_t> done = {0, 0, 0};
  int64_t compared = 0, different = 0;
  while (done != lengths) {
    std::vector<RaggedPart> parts;
    std::vector<at::Tensor> rows, want;
    std::vector<int64_t> counts;
    for (size_t i = 0; i < done.size(); ++i) {
      const int64_t most = random() % 3 != 0 ? 1 : i == 0 ? 300 : 90;
      counts.push_back(std::min(lengths[i] - done[i], 1 + static_cast<int64_t>(random()) % most));
    }
    for (const bool single : {true, false})
      for (size_t i = 0; i < done.size(); ++i) {
        const int64_t count = counts[i];
        if (count == 0 || (count == 1) != single) continue;
        std::vector<int32_t> blocks;
        for (int64_t b = 0; b < kOfText; ++b)
          blocks.push_back(static_cast<int32_t>(b * kTexts + static_cast<int64_t>(i)));
        parts.push_back({done[i], count, std::move(blocks)});
        const auto sample = static_cast<int64_t>(i);
        rows.push_back(all.narrow(0, done[i], count).select(1, sample));
        want.push_back(trained.narrow(0, done[i], count).select(1, sample));
      }
    for (const RaggedPart& p : parts) done[static_cast<size_t>(p.blocks[0])] += p.count;
    const PagedRows ragged(parts, kTexts * kOfText, kBlock, kInvariantGpu);
    const at::Tensor mixed = at::cat(rows).to(kInvariantGpu);
    const at::Tensor got = cache.attend(
        {mixed.narrow(2, 0, r), mixed.select(2, r), mixed.select(2, r + 1), {}}, ragged, options());
    const at::Tensor expected = at::cat(want).unsqueeze(1);
    different += got.ne(expected).sum().item<int64_t>();
    compared += got.numel();
  }
  EXPECT_EQ(different, 0) << "of " << compared;
  EXPECT_EQ(compared, (kLength + 700 + 33) * c.heads * c.d);
}

TEST_P(OrderedAttentionGpu, GradientsAreThoseOfFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const OrderedShape c = GetParam();
  at::manual_seed(6);
  constexpr int64_t kLength = 320, kSamples = 2;
  const at::Tensor q = at::randn({kLength, kSamples, c.heads, c.d}).to(at::kBFloat16),
                   k = at::randn({kLength, kSamples, c.groups, c.d}).to(at::kBFloat16),
                   v = at::randn({kLength, kSamples, c.groups, c.d}).to(at::kBFloat16),
                   dout = at::randn({kLength, kSamples, c.heads, c.d}).to(at::kBFloat16);
  const auto gradients = [&](at::Device device, at::ScalarType type, bool invariant) {
    const BatchInvariantScope mode(invariant);
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& t : {q, k, v})
      inputs.push_back(t.to(device, type).detach().requires_grad_(true));
    core_attention(inputs[0], inputs[1], inputs[2], options()).backward(dout.to(device, type));
    std::vector<at::Tensor> grads;
    for (const at::Tensor& t : inputs) grads.push_back(t.grad().cpu());
    return grads;
  };
  const auto got = gradients(kInvariantGpu, at::kBFloat16, true);
  const auto exact = gradients(at::kCPU, at::kDouble, false);
  for (size_t i = 0; i < 3; ++i) EXPECT_LT(relative_error(got[i], exact[i]), 2e-2) << i;
}

INSTANTIATE_TEST_SUITE_P(Shapes, OrderedAttentionGpu,
                         testing::Values(OrderedShape{8, 2, 128, -1, 0.0},
                                         OrderedShape{6, 6, 64, -1, 0.0},
                                         OrderedShape{6, 2, 72, 100, 0.0},
                                         OrderedShape{20, 1, 96, -1, 5.0},
                                         OrderedShape{4, 1, 64, 300, 2.0}));

// The linear layers of Llama 3 8B, and small ones with a bias or a summand.
TEST(BatchInvariantGpu, RowsOfProductsHaveTheSameBitsForAnyNumberOfRows) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  at::manual_seed(7);
  struct Shape {
    int64_t n, k;
    bool bias, addend;
  };
  for (const Shape& c : {Shape{6144, 4096, false, false}, Shape{4096, 4096, false, true},
                         Shape{28672, 4096, false, false}, Shape{4096, 14336, false, true},
                         Shape{32000, 4096, false, false}, Shape{192, 64, true, false},
                         Shape{64, 256, true, true}, Shape{1024, 72, false, false}}) {
    constexpr int64_t kMost = 8200;
    const at::TensorOptions type = at::dtype(at::kBFloat16).device(kInvariantGpu);
    const at::Tensor x = at::randn({kMost, c.k}, type), w = at::randn({c.n, c.k}, type),
                     bias = c.bias ? at::randn({c.n}, type) : at::Tensor(),
                     addend = c.addend ? at::randn({kMost, c.n}, type) : at::Tensor();
    const auto product = [&](int64_t first, int64_t rows) {
      return linear_forward(x.narrow(0, first, rows), w, bias,
                            addend.defined() ? addend.narrow(0, first, rows) : addend);
    };
    const at::Tensor all = product(0, kMost);
    std::vector<int64_t> counts;
    for (int64_t rows = 1; rows <= 256; ++rows) counts.push_back(rows);
    counts.insert(counts.end(), {300, 511, 1000, 2048, 4096});
    for (const int64_t rows : counts) {
      const int64_t first = (rows * 37) % (kMost - rows);
      EXPECT_TRUE(at::equal(product(first, rows), all.narrow(0, first, rows)))
          << c.n << " x " << c.k << ", " << rows << " rows";
    }
  }
}

// What one order of summing costs at each number of rows: a kernel that suits other numbers would
// be far behind the one that is taken without the mode.
TEST(BatchInvariantGpu, ProductsOfAnyNumberOfRowsAreNearlyAsFastAsWithoutTheMode) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::TensorOptions type = at::dtype(at::kBFloat16).device(kInvariantGpu);
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}) {
    const at::Tensor w = at::randn({n, k}, type);
    std::cout << "  " << n << " x " << k << ", time with the mode over that without:";
    for (int64_t rows = 1; rows <= 8192; rows *= 2) {
      const at::Tensor x = at::randn({rows, k}, type);
      const auto product = [&](bool invariant) {
        return [&, invariant] {
          const BatchInvariantScope mode(invariant);
          linear_forward(x, w, {}, {});
        };
      };
      const std::vector<double> times = milliseconds(x, {product(true), product(false)});
      const double ratio = times[0] / times[1];
      std::cout << " " << rows << ": " << format_fixed(ratio, 2);
      EXPECT_LT(ratio, 1.25) << n << " x " << k << ", " << rows << " rows";
    }
    std::cout << "\n";
  }
}

// The linear layers of Llama 3 8B and of the model of the rollouts in FP8 with a scale for 128
// elements, rows by 128, as layers fill them up: of rows as they are and of SwiGLU's results.
TEST(BatchInvariantGpu, RowsOfFp8ProductsHaveTheSameBitsForAnyNumberOfRows) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  at::manual_seed(8);
  constexpr at::ScalarType kCodes = at::kFloat8_e4m3fn;
  constexpr Orientations kRows{true, false};
  struct Shape {
    int64_t n, k;
    bool addend;
  };
  for (const Shape& c : {Shape{768, 512, false}, Shape{512, 512, true}, Shape{2048, 512, false},
                         Shape{512, 1024, true}, Shape{6144, 4096, false}, Shape{4096, 4096, true},
                         Shape{28672, 4096, false}, Shape{4096, 14336, true}}) {
    const int64_t kMost = c.n * c.k > 1 << 22 ? 8192 : 32768;
    const at::TensorOptions type = at::dtype(at::kBFloat16).device(kInvariantGpu);
    const at::Tensor x = at::randn({kMost, c.k}, type), gated = at::randn({kMost, 2 * c.k}, type),
                     addend = c.addend ? at::randn({kMost, c.n}, type) : at::Tensor();
    const QuantizedMatrix w =
        quantize_blocks(at::randn({c.n, c.k}, type), kCodes, kRows, /*square=*/true).rows;
    const auto products = [&](int64_t first, int64_t rows) {
      const at::Tensor some = x.narrow(0, first, rows),
                       summand = addend.defined() ? addend.narrow(0, first, rows) : addend;
      const QuantizedMatrix operands[] = {
          quantize_blocks(some, kCodes, kRows, false).rows,
          quantize_activation(gated.narrow(0, first, rows), {}, Activation::kSwiglu, 0.0, kCodes,
                              kRows, {})
              .rows};
      std::vector<at::Tensor> out;
      for (const QuantizedMatrix& operand : operands)
        out.push_back(quantized_product(operand, w, at::kBFloat16, {}, /*fast=*/false, summand));
      return out;
    };
    const std::vector<at::Tensor> all = products(0, kMost);
    for (const int64_t rows : {128, 256, 384, 512, 640, 1024, 1152, 2048, 2176, 4096, 8064}) {
      const int64_t first = (rows * 37) % (kMost - rows);
      const std::vector<at::Tensor> some = products(first, rows);
      for (size_t i = 0; i < all.size(); ++i)
        EXPECT_TRUE(at::equal(some[i], all[i].narrow(0, first, rows)))
            << c.n << " x " << c.k << ", " << rows << " rows, operand " << i;
    }
  }
}

std::vector<std::pair<std::string, ModelConfig>> invariant_models() {
  ModelConfig llama = small_served_model();
  llama.transformer.hidden_size = 512;
  llama.transformer.init_method_std = 0.08;
  ModelConfig gpt = llama;
  gpt.transformer.hidden_size = 256;
  gpt.transformer.group_query_attention = false;
  gpt.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  gpt.transformer.max_position_embeddings = 1024;
  gpt.transformer.normalization = Normalization::kLayerNorm;
  gpt.transformer.swiglu = false;
  gpt.transformer.add_bias_linear = true;
  ModelConfig gemma = llama;
  gemma.transformer.window_size = {100, 0};
  gemma.transformer.window_attn_skip_freq = "2";
  gemma.transformer.attn_logit_softcapping = 3.0;
  gemma.transformer.final_logit_softcapping = 5.0;
  gemma.transformer.qk_layernorm = true;
  ModelConfig adapted = llama;
  adapted.transformer.lora_rank = 24;
  std::vector<std::pair<std::string, ModelConfig>> all = {
      {"llama", llama}, {"gpt", gpt}, {"gemma", gemma}, {"adapters", adapted}};
  for (auto& [name, config] : all)
    config.transformer.attention_dropout = config.transformer.hidden_dropout = 0.0;
  return all;
}

// Products of FP8 with a scale for 128 elements, whose rows a step and a batch fill up to 128.
ModelConfig invariant_fp8_model() {
  ModelConfig config = invariant_models()[0].second;
  config.transformer.ffn_hidden_size = 1024;
  config.transformer.fp8_format = Fp8Format::kE4M3;
  config.transformer.fp8_recipe = Fp8Recipe::kBlockwise;
  return config;
}

RolloutOptions rollouts_on_gpu() {
  RolloutOptions options;
  options.schedules = 4;
  options.longest_prompt = 400;
  options.most_tokens = 40;
  options.device = kInvariantGpu;
  options.type = at::kBFloat16;
  options.runner.slots = 12;
  options.runner.block_size = 16;
  options.runner.device_blocks = 60;
  options.runner.host_blocks = 80;
  options.runner.graph_sizes = graph_sizes(-1, options.runner.slots);
  options.runner.most_rows = 4096;
  options.more_blocks = 40;
  return options;
}

TEST(BatchInvariantGpu, RolloutsHaveTheTrainersLogProbabilitiesInEveryBit) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  for (const auto& [name, config] : invariant_models()) {
    const Compared compared = rollouts(config, rollouts_on_gpu());
    EXPECT_EQ(compared.different, 0) << name << ", of " << compared.numbers;
    EXPECT_EQ(compared.texts, 168);
    EXPECT_GT(compared.accepted, 100);
    EXPECT_GT(compared.numbers, 25000);
    if (name != "adapters") {
      EXPECT_GT(compared.graph_steps, 100);
    }
  }
}

TEST(BatchInvariantGpu, RolloutsInFp8HaveTheTrainersLogProbabilitiesInEveryBit) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  RolloutOptions options = rollouts_on_gpu();
  options.texts = 64;  // so that a batch has whole tiles of rows
  const Compared compared = rollouts(invariant_fp8_model(), options);
  EXPECT_EQ(compared.different, 0) << "of " << compared.numbers;
  EXPECT_EQ(compared.texts, 256);
  EXPECT_GT(compared.accepted, 100);
  EXPECT_GT(compared.graph_steps, 100);
}

// Text i has i + 1 tokens to write, so that steps have 256 rows, 255 and so on down to one.
TEST(BatchInvariantGpu, EveryNumberOfRowsHasTheSameBitsInGraphsAndWithout) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  constexpr size_t kTexts = 256;
  std::mt19937 random(9);
  std::vector<DrivenSequence> given = random_sequences(random, kTexts);
  for (size_t i = 0; i < kTexts; ++i) {
    given[i].tokens = static_cast<int64_t>(i) + 1;
    given[i].start.ends.clear();
    given[i].start.log_probabilities = {.output_top = 1};
  }
  const ParallelGroups one;
  Served served(Served::make(invariant_models()[0].second, one), {}, at::kBFloat16, kInvariantGpu);
  RunnerOptions options = small_runner(256 * 18);
  options.block_size = 16;
  options.slots = kTexts;
  const auto run = [&](bool graphs) {
    options.graph_sizes = graph_sizes(graphs ? -1 : 0, options.slots);
    ModelRunner runner(*served.model, *served.weights, options);
    PlanDriver driver(runner, {.whole_prompts = 1.0}, 1);
    std::vector<DrivenSequence> texts = given;
    driver.run(texts);
    EXPECT_EQ(runner.graph_steps() > 250, graphs) << runner.graph_steps();
    return texts;
  };
  const std::vector<DrivenSequence> with = run(true), without = run(false);
  int64_t different = 0;
  for (size_t i = 0; i < kTexts; ++i)
    for (size_t j = 0; j < with[i].drawn.size(); ++j)
      different += with[i].drawn[j].id != without[i].drawn.at(j).id ||
                   with[i].drawn[j].log_probabilities != without[i].drawn[j].log_probabilities;
  EXPECT_EQ(different, 0);
  // Few of them alone, too.
  for (const size_t i : {3, 100, 200}) {
    std::vector<DrivenSequence> alone = {given[i]};
    ModelRunner runner(*served.model, *served.weights, options);
    PlanDriver(runner, {.whole_prompts = 0.3}, 2).run(alone);
    EXPECT_EQ(ids_of(alone[0]), ids_of(with[i]));
  }
}

// A Llama of Hugging Face with random weights, and an adapter of all its linears.
struct WrittenFolders {
  std::filesystem::path base, adapter;
};

WrittenFolders write_random_llama() {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / cat("random_llama.", getpid());
  std::filesystem::remove_all(folder);
  const WrittenFolders written{folder / "base", folder / "adapter"};
  std::filesystem::create_directories(written.base);
  std::filesystem::create_directories(written.adapter);
  constexpr int64_t kHidden = 256, kGroups = 128, kFfn = 512, kRank = 16;
  const auto write = [](const std::filesystem::path& file, const std::string& text) {
    std::ofstream(file) << text;
  };
  write(written.base / "config.json",
        cat(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": )",
            kHidden, R"(, "intermediate_size": )", kFfn,
            R"(, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "vocab_size": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
               "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false,
               "attention_bias": false, "mlp_bias": false, "torch_dtype": "bfloat16"})"));
  write(written.adapter / "adapter_config.json",
        cat(R"({"peft_type": "LORA", "r": )", kRank,
            R"(, "lora_alpha": 24, "lora_dropout": 0.0, "bias": "none", "target_modules":
               ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]})"));
  at::manual_seed(3);
  std::vector<std::pair<std::string, at::Tensor>> base, adapter;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    base.emplace_back(name + ".weight", at::randn({rows, columns}).mul_(0.08).to(at::kBFloat16));
    if (!name.ends_with("_proj")) return;
    const std::string prefix = "base_model.model." + name;
    adapter.emplace_back(prefix + ".lora_A.weight", at::randn({kRank, columns}).mul_(0.1));
    adapter.emplace_back(prefix + ".lora_B.weight", at::randn({rows, kRank}).mul_(0.1));
  };
  const auto add_norm = [&](const std::string& name) {
    base.emplace_back(name + ".weight", at::ones({kHidden}, at::kBFloat16));
  };
  add("model.embed_tokens", 64, kHidden);
  add("lm_head", 64, kHidden);
  add_norm("model.norm");
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    add_norm(layer + "input_layernorm");
    add_norm(layer + "post_attention_layernorm");
    add(layer + "self_attn.q_proj", kHidden, kHidden);
    add(layer + "self_attn.k_proj", kGroups, kHidden);
    add(layer + "self_attn.v_proj", kGroups, kHidden);
    add(layer + "self_attn.o_proj", kHidden, kHidden);
    add(layer + "mlp.gate_proj", kFfn, kHidden);
    add(layer + "mlp.up_proj", kFfn, kHidden);
    add(layer + "mlp.down_proj", kHidden, kFfn);
  }
  const auto save = [](const std::filesystem::path& file,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    std::vector<SafetensorsTensor> given;
    for (const auto& [name, tensor] : tensors)
      given.push_back(
          {name, to_dtype(tensor.scalar_type()), tensor.sizes().vec(), tensor.const_data_ptr()});
    write_safetensors(file, given);
  };
  save(written.base / "model.safetensors", base);
  save(written.adapter / "adapter_model.safetensors", adapter);
  return written;
}

// Chunks, prefixes that are shared, preemption, cancels, guesses also of models, adapters,
// suspensions, exchanged weights and graphs. MEGATRON_SERVED_SCHEDULES: how many;
// MEGATRON_FIRST_SCHEDULE: from which on.
TEST(BatchInvariantGpu, RandomSchedulesGiveWhatEachRequestGetsAloneInEveryBit) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const BatchInvariantScope mode(true);
  const ParallelGroups one;
  const ScheduledPlace place{kInvariantGpu, at::kBFloat16, /*alone_by_runner=*/true, /*stretch=*/8};
  std::vector<std::unique_ptr<ScheduledModel>> models;
  for (const auto& [name, config] : invariant_models())
    if (name != "adapters")
      models.push_back(std::make_unique<ScheduledModel>(
          name, [&one, c = config] { return Served::make(c, one); }, place));
  const WrittenFolders written = write_random_llama();
  LoadModelRequest base;
  base.load = written.base;
  base.dtype = at::kBFloat16;
  base.device = kInvariantGpu;
  base.batch_invariant = true;
  base.tokenizer_required = false;
  models.push_back(std::make_unique<ScheduledModel>("adapters", base, written.adapter, one, place));
  const auto number = [](const char* variable, int otherwise) {
    const char* given = std::getenv(variable);
    return given != nullptr ? std::atoi(given) : otherwise;
  };
  const int first = number("MEGATRON_FIRST_SCHEDULE", 0),
            count = number("MEGATRON_SERVED_SCHEDULES", 40);
  Counts counts;
  for (int seed = first; seed < first + count; ++seed) {
    ScheduledModel& model = *models[static_cast<size_t>(seed) % models.size()];
    SCOPED_TRACE(cat("seed ", seed, ", ", model.name()));
    play_schedule(model, static_cast<uint32_t>(seed), counts);
    if (testing::Test::HasFailure()) return;
  }
  for (const auto& [what, times] : counts) std::cout << "  " << what << ": " << times << "\n";
  for (const char* what :
       {"steps by graphs", "divided prompts", "tokens from cached prefixes", "preemptions",
        "computed again", "cancelled", "guesses that stand", "guesses that fall",
        "guesses of models that stand", "guesses of models that fall",
        "steps of drafting models by graphs", "steps with several adapters", "caches offloaded",
        "caches dropped", "weights dropped", "weights exchanged", "pauses with requests left",
        "whole texts"})
    EXPECT_GT(counts[what], 0) << what;
}

// With ranks as processes, each with a GPU of its own, if a launcher has started several:
// torchrun --no-python --nproc-per-node 4 gpu_tests ...
Compared rollouts_of_launch(const ModelConfig& config, RolloutOptions options) {
  const Launch launch = launch_from_environment();
  if (launch.world_size == 1) return rollouts(config, options);
  options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(launch.local_rank));
  const c10::DeviceGuard guard(options.device);
  options.tensor = launch.world_size;
  const Connection connection = connect(launch, {}, options.device);
  return rollouts_of_rank(config, options, connection.world);
}

// Measures the kernels of one step that only decodes: that number `which` of them, the same one on
// all ranks.
class ProfiledDecode final : public StepRunner {
 public:
  ProfiledDecode(ModelRunner& runner, at::Device device, int which)
      : runner_(runner), device_(device), before_(which) {}
  const RunnerFacts& facts() const override { return runner_.facts(); }
  void launch(const StepPlan& plan) override {
    const bool decodes = !plan.parts.empty() && plan.starts.empty() && plan.swap_in.empty() &&
                         std::ranges::all_of(plan.parts, [](const PlanPart& part) {
                           return part.count == 1 && part.draws;
                         });
    if (!decodes || before_-- != 0) return runner_.launch(plan);
    synchronize(device_);  // what was sent between ranks for the plan
    const int64_t graph_steps = runner_.graph_steps();
    kernels_ = profile_kernels([&] {
      runner_.launch(plan);
      synchronize(device_);
    });
    in_graph_ = runner_.graph_steps() > graph_steps;
  }
  std::optional<StepResult> take(int64_t wait_ns) override { return runner_.take(wait_ns); }
  void begin(const RunnerTransition& transition) override { runner_.begin(transition); }
  std::optional<std::string> poll(int64_t wait_ns) override { return runner_.poll(wait_ns); }

  const std::vector<KernelEvent>& kernels() const { return kernels_; }
  bool in_graph() const { return in_graph_; }

 private:
  ModelRunner& runner_;
  const at::Device device_;
  int before_;
  std::vector<KernelEvent> kernels_;
  bool in_graph_ = false;
};

// Where ranks reach each other's memory, in the mode and without it: sums of layers, the gathered
// maxima and the counts of draws (top-k and top-p, too) and all reports of log-probabilities are
// kernels of ours.
TEST(BatchInvariantGpu, DecodeStepsOfTensorRanksHaveNoKernelOfNccl) {
  const Launch launch = launch_from_environment();
  if (!at::hasCUDA() || launch.world_size == 1) GTEST_SKIP() << "not two ranks";
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(launch.local_rank));
  const c10::DeviceGuard guard(device);
  const Connection connection = connect(launch, {}, device);
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = launch.world_size;
  const ParallelGroups groups = make_parallel_groups(parallel, connection.world);
  ModelConfig config = invariant_models()[0].second;
  config.transformer.num_query_groups = config.transformer.num_attention_heads;
  for (const bool invariant : {false, true}) {
    const BatchInvariantScope mode(invariant);
    Served served(Served::make(config, groups), {}, at::kBFloat16, device);
    RunnerOptions options = rollouts_on_gpu().runner;
    options.device_blocks = 200;
    ModelRunner runner(*served.model, *served.weights, options);
    const auto sums = groups.tp.held_peer_collectives();
    if (!sums || !sums->is_open()) GTEST_SKIP() << "peers' memory is out of reach";
    ProfiledDecode profiled(runner, device, /*which=*/10);
    std::mt19937 random(11);
    std::vector<DrivenSequence> texts = random_sequences(random, 12, 100, 40);
    for (size_t i = 0; i < texts.size(); ++i) {
      texts[i].tokens = 40;
      texts[i].start.sampling.top_k = i % 3 == 1 ? 5 : 0;
      texts[i].start.sampling.top_p = i % 3 == 2 ? 0.5 : 1.0;
    }
    drive_ranks(groups.world, profiled, {.whole_prompts = 1.0}, 3, texts, device);
    EXPECT_TRUE(profiled.in_graph());
    EXPECT_GT(profiled.kernels().size(), 20u);
    for (const KernelEvent& kernel : profiled.kernels()) {
      std::string name = kernel.name;
      std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
      EXPECT_EQ(name.find("nccl"), std::string::npos) << kernel.name << ", mode " << invariant;
    }
  }
}

TEST(BatchInvariantGpu, RolloutsOfTensorRanks) {
  const Launch launch = launch_from_environment();
  if (!at::hasCUDA() || launch.world_size == 1) GTEST_SKIP() << "not two ranks";
  const BatchInvariantScope mode(true);
  ModelConfig config = invariant_models()[0].second;
  config.transformer.num_query_groups = config.transformer.num_attention_heads;
  const Compared compared = rollouts_of_launch(config, rollouts_on_gpu());
  EXPECT_EQ(compared.different, 0) << "of " << compared.numbers;
  if (launch.rank == 0) {
    EXPECT_EQ(compared.texts, 168);
    EXPECT_GT(compared.graph_steps, 100);
  }
}

// Eight layers of Llama 3 8B; MEGATRON_ROLLOUTS: how many texts, each of which is served twice.
TEST(BatchInvariantGpu, RolloutsOfTheShapeOfLlama8B) {
  const char* wanted = std::getenv("MEGATRON_ROLLOUTS");
  if (!at::hasCUDA() || wanted == nullptr) GTEST_SKIP() << "no GPU, or not MEGATRON_ROLLOUTS";
  const BatchInvariantScope mode(true);
  ModelConfig config = invariant_models()[0].second;
  TransformerConfig& t = config.transformer;
  t.num_layers = 8;
  t.hidden_size = 4096;
  t.ffn_hidden_size = 14336;
  t.num_attention_heads = 32;
  t.num_query_groups = 8;
  t.init_method_std = 0.02;
  config.vocab_size = config.padded_vocab_size = 128256;
  RolloutOptions options = rollouts_on_gpu();
  options.texts = 50;
  options.schedules = (std::atoi(wanted) + 49) / 50;
  options.runner.slots = 50;
  options.runner.device_blocks = 400;
  options.more_blocks = 100;
  options.runner.graph_sizes = graph_sizes(-1, options.runner.slots);
  const Compared compared = rollouts_of_launch(config, options);
  EXPECT_EQ(compared.different, 0);
  if (launch_from_environment().rank == 0) {
    EXPECT_GT(compared.accepted, 20 * options.schedules);
  }
  std::cout << compared.texts << " texts, " << compared.numbers << " numbers, "
            << compared.different << " different, " << compared.accepted << " drafts stood, "
            << compared.graph_steps << " steps by graphs, " << compared.divided_steps
            << " with rows divided over ranks" << std::endl;
}

// What the rollouts rule out.
TEST(BatchInvariantGpu, WithoutTheModeSomeDiffer) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  RolloutOptions options = rollouts_on_gpu();
  options.schedules = 1;
  EXPECT_GT(rollouts(invariant_models()[0].second, options).different, 100);
}

}  // namespace
}  // namespace megatron
