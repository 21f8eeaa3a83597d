// The plan of a server's memory against what it takes.
#include "megatron/inference/memory_plan.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/inference/engine_config.h"
#include "megatron/inference/graphs/decode_graphs.h"
#include "megatron/interop/load_model.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

struct PlannedKind {
  std::string name;
  ModelConfig config;
};

std::vector<PlannedKind> planned_kinds() {
  std::vector<PlannedKind> kinds = {{"grouped queries", small_served_model()}};
  ModelConfig wide = small_served_model();
  wide.transformer.group_query_attention = false;
  wide.transformer.kv_channels = 24;
  wide.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  kinds.push_back({"wide heads, each with keys", wide});
  ModelConfig latent = small_served_model();
  TransformerConfig& t = latent.transformer;
  t.group_query_attention = false;
  t.multi_latent_attention = true;
  t.q_lora_rank = 16;
  t.kv_lora_rank = 12;
  t.qk_head_dim = 8;
  t.qk_pos_emb_head_dim = 4;
  t.v_head_dim = 8;
  kinds.push_back({"latents", latent});
  ModelConfig experts = small_served_model();
  experts.transformer.num_experts = 4;
  experts.transformer.moe_router_topk = 2;
  kinds.push_back({"experts", experts});
  kinds.push_back({"a pattern", hybrid_served_model("M-*-G-")});
  kinds.push_back({"states alone", hybrid_served_model("MM-")});
  for (PlannedKind& kind : kinds) kind.config.transformer.finalize();
  return kinds;
}

TEST(MemoryPlan, TheCacheTakesWhatIsPlanned) {
  const ParallelGroups one;
  for (const auto& [name, config] : planned_kinds())
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      Served served(Served::make(config, one), {}, type);
      const auto element = static_cast<int64_t>(c10::elementSize(type));
      const CachePlan plan =
          plan_cache(kept_bytes(config, served.model->slice(), 1, element),
                     {.slots = 4, .block_size = 4, .wanted = 20, .needed = 1, .hint = ""}, 1 << 30);
      EXPECT_EQ(plan.blocks, 20);
      const ModelRunner runner(*served.model, small_runner(20));
      EXPECT_EQ(runner.cache_bytes(), plan.bytes()) << name << " " << type;
      ServedShape shape;
      shape.element = element;
      EXPECT_EQ(serving_memory(config, shape, 0).weights, served.store.bytes()) << name;
    }
}

// States have rows for drafts, as many as the flag allows.
TEST(MemoryPlan, RowsOfDraftsAreCounted) {
  const ParallelGroups one;
  EngineConfig engine;
  engine.max_requests = 4;
  engine.speculation.num_speculative_tokens = 3;
  for (const char* pattern : {"M*", "G-", "GM"})
    for (const bool replays : {false, true}) {
      engine.states.replay_chunks = replays;
      const ModelConfig config = hybrid_served_model(pattern);
      Served served(Served::make(config, one));
      RunnerOptions options = small_runner(20);
      options.keeping = served_shape(engine, config, at::kDouble, /*on_gpu=*/false).keeping;
      EXPECT_EQ(options.keeping.drafts, 3);
      const ModelRunner runner(*served.model, options);
      EXPECT_EQ(runner.facts().state_drafts, 3);
      const StageSlice& slice = served.model->slice();
      const KeptBytes kept = kept_bytes(config, slice, 1, sizeof(double), options.keeping);
      EXPECT_EQ(runner.cache_bytes(), 20 * 4 * kept.position + 4 * kept.sequence) << pattern;
      StateKeeping without = options.keeping;
      without.drafts = 0;
      EXPECT_GT(kept.sequence, kept_bytes(config, slice, 1, sizeof(double), without).sequence);
    }
}

TEST(MemoryPlan, ModelsWithRetrievalGetNoDrafts) {
  SpeculationConfig none, some;
  some.num_speculative_tokens = 3;
  for (const auto& [name, config] : planned_kinds())
    for (const SpeculationConfig& speculation : {none, some})
      EXPECT_EQ(error_of([&] { speculation.check(config); }), "") << name;
  ModelConfig retro = small_served_model();
  retro.type = "retro";
  EXPECT_EQ(error_of([&] { some.check(retro); }),
            "--num-speculative-tokens is not built for a model with retrieval");
}

// A draft model is on the first stage: its weights, and blocks of as many positions.
TEST(MemoryPlan, DraftModelsAreCounted) {
  ModelConfig config = small_served_model();
  config.transformer.num_layers = 4;
  ModelConfig draft = small_served_model();
  draft.transformer.num_layers = 1;
  draft.transformer.ffn_hidden_size = 4096;
  for (ModelConfig* one : {&config, &draft}) one->transformer.finalize();
  EngineConfig engine;
  engine.max_requests = 4;
  engine.block_size = 8;
  engine.cache_gb = 1e-4;
  ServedShape shape = served_shape(engine, config, at::kFloat, /*on_gpu=*/false);
  shape.stages = 2;
  std::vector<ServingMemory> plain, drafted;
  for (const bool with : {false, true}) {
    if (with) shape.draft = draft_memory(draft, at::kDouble, shape);
    for (int64_t stage = 0; stage < 2; ++stage) {
      ServingMemory& memory = (with ? drafted : plain).emplace_back();
      memory = serving_memory(config, shape, stage);
      memory.cache = served_cache(engine, config, shape, memory.slice, 0);
    }
  }
  const ParallelGroups one;
  Served served(Served::make(draft, one), {}, at::kDouble);
  EXPECT_EQ(shape.draft.weights, served.store.bytes());
  EXPECT_EQ(drafted[1].total(), plain[1].total());
  EXPECT_EQ(drafted[1].draft.weights, 0);
  EXPECT_EQ(drafted[0].cache.block_bytes,
            plain[0].cache.block_bytes + engine.block_size * shape.draft.kept.position);
  RunnerOptions options = small_runner(drafted[0].cache.blocks);
  options.block_size = engine.block_size;
  EXPECT_EQ(ModelRunner(*served.model, options).cache_bytes(),
            drafted[0].cache.blocks * engine.block_size * shape.draft.kept.position);
  EXPECT_LE(drafted[0].cache.bytes(), 107375);
  EXPECT_GT(drafted[0].step(), plain[0].step()) << "its step is the larger one";
  EXPECT_EQ(drafted[0].total(), drafted[0].weights + served.store.bytes() +
                                    drafted[0].cache.bytes() + drafted[0].step());
}

// The weights that a model gets are those that the file has after the caller has accepted it.
TEST(MemoryPlan, ModelsAreAcceptedBeforeTheirWeightsAreRead) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "accepted";
  std::filesystem::remove_all(folder);
  std::filesystem::copy(MEGATRON_SOURCE_DIR "/tests/golden/hf/mistral", folder);
  const std::filesystem::path file = folder / "model.safetensors";
  LoadModelRequest request{.load = folder, .dtype = at::kFloat};
  request.accept = [&](const ModelConfig& config, const Tokenizer* tokenizer) {
    EXPECT_TRUE(tokenizer != nullptr);
    EXPECT_GT(config.transformer.num_layers, 0);
    std::fstream weights(file, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    weights.read(reinterpret_cast<char*>(&header), sizeof(header));
    const uint64_t begin = sizeof(header) + header;
    weights.seekp(static_cast<std::streamoff>(begin));
    weights << std::string(std::filesystem::file_size(file) - begin, '\0');
  };
  const ParallelGroups one;
  const LoadedModel loaded = load_model(request, one);
  for (const Parameter* parameter : loaded.model->parameters())
    EXPECT_EQ(parameter->value.count_nonzero().item<int64_t>(), 0);
  request.accept = [](const ModelConfig&, const Tokenizer*) { throw_error("not this one"); };
  EXPECT_EQ(error_of([&] { load_model(request, one); }), "not this one");
  EXPECT_EQ(error_of([&] { describe_model(request, 1); }), "not this one");
}

// States in other types, and with the rows of open chunks.
TEST(MemoryPlan, StatesTakeWhatIsPlanned) {
  const ParallelGroups one;
  const ModelConfig config = hybrid_served_model("MG*-");
  int64_t usual = 0;
  for (const StateKeeping& keeping :
       {StateKeeping{}, StateKeeping{.conv = at::kFloat, .state = at::kBFloat16},
        StateKeeping{.replays_chunks = true}}) {
    Served served(Served::make(config, one), {}, at::kBFloat16);
    RunnerOptions options = small_runner(20);
    options.keeping = keeping;
    const KeptBytes kept = kept_bytes(config, served.model->slice(), 1, 2, keeping);
    const ModelRunner runner(*served.model, options);
    EXPECT_EQ(runner.cache_bytes(), 4 * (20 * kept.position + kept.sequence));
    if (keeping == StateKeeping{}) usual = kept.sequence;
    if (keeping.replays_chunks) {
      EXPECT_GT(kept.sequence, usual);
    }
  }
}

// Layers that cost different times, divided by `|` or by their weights; and those of a GPT that
// stages do not divide.
TEST(MemoryPlan, StagesOfPatterns) {
  const auto layers = [](const ModelConfig& config, int64_t stages) {
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < stages; ++i)
      counts.push_back(served_slice(config, i, stages).num_layers);
    return counts;
  };
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(layers(hybrid_served_model("M|-M*-"), 2), (Counts{1, 4}));
  EXPECT_EQ(layers(hybrid_served_model("M|-M*-"), 1), (Counts{5}));
  ModelConfig wide = hybrid_served_model("-MMMM");
  wide.transformer.ffn_hidden_size = 4000;
  EXPECT_EQ(layers(wide, 2), (Counts{1, 4}));
  wide.transformer.hybrid_layer_pattern = "-M|MM|M";  // for other stages
  EXPECT_EQ(layers(wide, 2), (Counts{1, 4}));
  ModelConfig gpt = small_served_model();
  gpt.transformer.num_layers = 5;
  gpt.transformer.finalize();
  const Counts uneven = layers(gpt, 2);
  EXPECT_EQ(uneven[0] + uneven[1], 5);
  EXPECT_LE(std::abs(uneven[0] - uneven[1]), 1);
  EXPECT_EQ(error_of([&] { served_slice(gpt, 0, 6); }),
            "--pipeline-model-parallel-size 6 is more than the 5 layers of the model");
  const ServingMemory first = serving_memory(wide, {.stages = 2}, 0);
  EXPECT_EQ(first.slice.num_layers, 1);
}

TEST(MemoryPlan, TheBudgetLimitsTheBlocks) {
  const KeptBytes kept{.position = 100, .sequence = 1000};
  CacheDemand demand{.slots = 4, .block_size = 16, .wanted = 50, .needed = 3, .hint = "buy more"};
  EXPECT_EQ(plan_cache(kept, demand, 1 << 30).blocks, 50);
  const CachePlan plan = plan_cache(kept, demand, 4000 + 7 * 1600 + 1599);
  EXPECT_EQ(plan.blocks, 7);
  EXPECT_EQ(plan.bytes(), 4000 + 7 * 1600);
  EXPECT_EQ(plan_cache(kept, demand, 4000 + 3 * 1600).blocks, 3);
  EXPECT_EQ(error_of([&] { plan_cache(kept, demand, 4000 + 3 * 1600 - 1); }),
            "a cache of 0.00 GiB holds 2 blocks of 16 tokens, and 3 are needed; each takes 1600 "
            "bytes, beside 4000 bytes of states\nhint: buy more");
  EXPECT_EQ(plan_cache({.position = 0, .sequence = 1}, demand, 4).blocks, 50) << "states alone";
  // A step that needs more than a fifth of a GPU gets it.
  EXPECT_EQ(gpu_cache_budget(1000, 100), 800);
  EXPECT_EQ(gpu_cache_budget(1000, 300), 700);
  EXPECT_GT(cache_budget(at::kCPU, 0), 1 << 20);
}

// A size that a flag names is refused before anything is allocated.
TEST(MemoryPlan, ACacheThatDoesNotFitIsRefused) {
  ServingMemory memory;
  memory.cache = {.blocks = 40, .block_bytes = 1 << 30};
  memory.activations = 3 << 29;
  memory.sampling = 1 << 29;
  memory.check_fits((int64_t{41} << 30) + (1 << 29));
  EXPECT_EQ(error_of([&] { memory.check_fits((int64_t{41} << 30) + (1 << 29) - 1); }),
            "a cache of 40.00 GiB and the largest step of 1.50 GiB do not fit the 41.49 GiB that "
            "the GPU has free beside the weights\nhint: "
            "--inference-dynamic-batching-buffer-size-gb 39.99 or less");
  EXPECT_EQ(free_memory(at::kCPU), std::nullopt);
}

TEST(MemoryPlan, GraphsHoldLogitsBesideOtherSteps) {
  const ModelConfig config = small_served_model();
  EngineConfig engine;
  engine.max_requests = 100;
  const auto step = [&](int64_t graphs, bool on_gpu) {
    engine.num_cuda_graphs = graphs;
    return serving_memory(config, served_shape(engine, config, at::kBFloat16, on_gpu), 0).step();
  };
  const int64_t logits = 100 * config.padded_vocab_size * 2;
  EXPECT_GT(step(-1, true), step(0, true) + logits);
  EXPECT_EQ(step(3, true), step(-1, true)) << "the largest one counts";
  EXPECT_EQ(step(-1, false), step(0, false)) << "a CPU has none";
}

// Graphs of two tensor ranks hold half the logits; sums of their largest step go through an inbox.
TEST(MemoryPlan, TensorRanksHaveGraphsAndWriteIntoEachOthersMemory) {
  const ModelConfig config = small_served_model();
  EngineConfig engine;
  engine.max_requests = 100;
  ServedShape shape = served_shape(engine, config, at::kBFloat16, /*on_gpu=*/true);
  EXPECT_EQ(shape.graph_rows, 256) << "for prompts";
  const ServingMemory alone = serving_memory(config, shape, 0);
  EXPECT_EQ(alone.sums, 0);
  shape.tensor_ranks = 2;
  const ServingMemory two = serving_memory(config, shape, 0);
  const int64_t half_of_logits = 256 * config.padded_vocab_size / 2 * 2;
  EXPECT_GT(two.graphs, half_of_logits);
  EXPECT_LE(two.graphs, alone.graphs - half_of_logits);
  // The counts of a selection are larger than the hidden states of such a model; steps of 2,048
  // tokens exchange parts of 1,024 rows.
  const int64_t counts = PeerCollectives::memory_bytes(2, 256 * 256 * 8);
  EXPECT_GE(counts, 2 * 2 * 256 * 256 * 8) << "calls by turns, ranks";
  EXPECT_EQ(two.sums, counts + PeerMailbox::memory_bytes(2, 1024 * 32 * 2));
  ModelConfig wide = config;
  wide.transformer.hidden_size = 2048;
  EXPECT_EQ(serving_memory(wide, shape, 0).sums, PeerCollectives::memory_bytes(2, 256 * 2048 * 2) +
                                                     PeerMailbox::memory_bytes(2, 1024 * 2048 * 2));
  shape.max_step_tokens = 511;
  EXPECT_EQ(serving_memory(config, shape, 0).sums, counts) << "too few rows for each rank";
  shape.max_step_tokens = 2048;
  ModelConfig experts = config;
  experts.transformer.num_experts = 4;
  EXPECT_EQ(serving_memory(experts, shape, 0).sums, counts) << "layers that are built whole";
  engine.speculation.num_speculative_tokens = 3;
  EXPECT_EQ(served_shape(engine, config, at::kBFloat16, true).graph_rows, 400);
  engine.max_requests = 1;
  EXPECT_EQ(served_graph_sizes(engine, served_shape(engine, config, at::kBFloat16, true)),
            (std::vector<int64_t>{1, 2, 4, 64, 128, 192, 256}));
  shape.on_gpu = false;
  EXPECT_EQ(serving_memory(config, shape, 0).sums, 0);
}

TEST(MemoryPlan, SizesOfGraphsReachTheLargestStep) {
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(graph_sizes(0, 64), Sizes());
  EXPECT_EQ(graph_sizes(4, 64), (Sizes{16, 32, 48, 64}));
  EXPECT_EQ(graph_sizes(3, 10), (Sizes{4, 7, 10}));
  EXPECT_EQ(graph_sizes(9, 2), (Sizes{1, 2}));
  EXPECT_EQ(graph_sizes(-1, 1), (Sizes{1}));
  EXPECT_EQ(graph_sizes(-1, 30), (Sizes{1, 2, 4, 8, 16, 24, 30}));
  const Sizes many = graph_sizes(-1, 256);
  EXPECT_EQ(many.size(), 19);
  for (size_t i = 4; i < many.size(); ++i) EXPECT_LE(4 * many[i], 5 * many[i - 1] + 40) << many[i];
}

TEST(MemoryPlan, RanksDivideAModel) {
  ModelConfig config = small_served_model();
  config.transformer.num_layers = 4;
  config.transformer.untie_embeddings_and_output_weights = true;
  config.transformer.finalize();
  ServedShape shape;
  const ServingMemory whole = serving_memory(config, shape, 0);
  shape.stages = 2;
  const ServingMemory first = serving_memory(config, shape, 0),
                      second = serving_memory(config, shape, 1);
  EXPECT_EQ(first.parameters + second.parameters, whole.parameters);
  EXPECT_EQ(first.slice.num_layers, 2);
  EXPECT_EQ(second.slice.first_layer, 2);
  EXPECT_EQ(first.sampling, 0) << "the last stage draws";
  EXPECT_EQ(second.sampling, whole.sampling);
  const auto kept = [&](const StageSlice& slice, int64_t ranks) {
    return kept_bytes(config, slice, ranks, 4).position;
  };
  EXPECT_EQ(kept(first.slice, 1) + kept(second.slice, 1), kept(whole.slice, 1));
  EXPECT_EQ(kept(whole.slice, 2), kept(whole.slice, 1) / 2);
  EXPECT_EQ(kept(whole.slice, 4), kept(whole.slice, 2)) << "two groups of keys on four ranks";
  shape.stages = 1;
  shape.tensor_ranks = 2;
  EXPECT_LT(serving_memory(config, shape, 0).weights, whole.weights * 6 / 10);
  EXPECT_EQ(serving_memory(config, shape, 0).sampling, whole.sampling / 2);
}

// Bytes that a step takes at its peak, on the CPU.
class StepMeter {
 public:
  explicit StepMeter(StepRunner& runner) : runner_(runner) {}
  int64_t most(const StepPlan& plan) {
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    runner_.launch(plan);
    runner_.take(int64_t{60'000'000'000});
    return meter->most;
  }

 private:
  StepRunner& runner_;
};

// `count` positions from `first` on, in consecutive blocks.
void add_rows(StepPlan& plan, int32_t slot, int64_t first, int32_t count, bool draws) {
  PlanPart part;
  part.slot = slot;
  part.first = first;
  part.count = count;
  part.known = first + count;
  part.draws = draws;
  plan.parts.push_back(part);
  plan.tokens.insert(plan.tokens.end(), static_cast<size_t>(count), 7);
}

void add_start(StepPlan& plan, int32_t slot, std::vector<int32_t> blocks) {
  SlotStart start;
  start.slot = slot;
  start.ids.assign(4, 7);
  start.prompt_length = 4;
  start.sampling.temperature = 0.7;
  start.sampling.presence_penalty = 0.5;
  plan.starts.push_back(start);
  plan.blocks.push_back({slot, 0, std::move(blocks)});
}

// A model whose tensors are large against what no plan counts: lists of rows, blocks and positions.
ModelConfig wide_model(bool latent) {
  ModelConfig config = small_served_model();
  TransformerConfig& t = config.transformer;
  t.hidden_size = 256;
  t.num_attention_heads = 8;
  t.num_query_groups = 4;
  t.seq_length = 1024;
  if (latent) {
    t.group_query_attention = false;
    t.multi_latent_attention = true;
    t.q_lora_rank = 64;
    t.kv_lora_rank = 64;
    t.qk_head_dim = 32;
    t.qk_pos_emb_head_dim = 16;
    t.v_head_dim = 32;
  }
  config.vocab_size = 20000;
  config.padded_vocab_size = 20480;
  t.finalize();
  return config;
}

struct MemoryModeScope {
  explicit MemoryModeScope(bool on) { set_batch_invariant(on); }
  ~MemoryModeScope() { set_batch_invariant(false); }
};

TEST(MemoryPlan, AStepTakesWhatIsPlanned) {
  const ParallelGroups one;
  for (const bool latent : {false, true}) {
    const ModelConfig config = wide_model(latent);
    for (const bool invariant : {false, true})
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        if (invariant && type != at::kFloat) continue;
        const MemoryModeScope mode(invariant);
        Served served(Served::make(config, one), {}, type);
        RunnerOptions options;
        options.slots = 64;
        options.device_blocks = 64;
        ModelRunner runner(*served.model, options);
        ServedShape shape;
        shape.slots = options.slots;
        shape.max_positions = 1024;
        shape.max_step_tokens = 512;
        shape.element = static_cast<int64_t>(c10::elementSize(type));
        const ServingMemory planned = serving_memory(config, shape, 0);
        // Together with weights and cache within 5%, and not more than 2% above the plan.
        const int64_t kept = planned.weights + runner.cache_bytes();
        const auto expect_planned = [&](int64_t most, int64_t wanted, const char* what) {
          const double measured =
              static_cast<double>(kept + most) / static_cast<double>(kept + wanted);
          EXPECT_GT(measured, 0.95) << what << " " << most << " of " << wanted;
          EXPECT_LT(measured, 1.02) << what << " " << most << " of " << wanted;
        };
        // The last chunk of the longest prompt.
        StepPlan chunk;
        chunk.step = 1;
        std::vector<int32_t> blocks(16);
        for (int32_t i = 0; i < 16; ++i) blocks[static_cast<size_t>(i)] = i;
        add_start(chunk, 0, blocks);
        add_rows(chunk, 0, 512, 512, false);
        expect_planned(StepMeter(runner).most(chunk), planned.activations, "chunk");
        StepPlan draws;
        draws.step = 2;
        draws.releases = {0};
        for (int32_t slot = 0; slot < 64; ++slot) {
          add_start(draws, slot, {slot});
          add_rows(draws, slot, 3, 1, true);
        }
        expect_planned(StepMeter(runner).most(draws), planned.sampling, "draws");
      }
  }
}

}  // namespace
}  // namespace megatron
