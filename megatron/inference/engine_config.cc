#include "megatron/inference/engine_config.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/inference/graphs/decode_graphs.h"

namespace megatron {
namespace {

constexpr double kFlagGiB = 1 << 30;
// Prompts of up to so many tokens run as graphs, which saves the milliseconds of their launches;
// the distance between graphs for them.
constexpr int64_t kPromptGraphRows = 256, kPromptGraphDistance = 64;
constexpr std::string_view kKvCacheTypes[] = {"auto", "fp8"};

CacheDemand cache_demand(const EngineConfig& config, const ServedShape& shape) {
  CacheDemand demand;
  demand.slots = shape.slots;
  demand.block_size = config.block_size;
  demand.wanted = shape.slots * ((shape.max_positions + config.block_size - 1) / config.block_size);
  demand.hint =
      "raise --inference-dynamic-batching-buffer-size-gb, or lower "
      "--inference-dynamic-batching-block-size or --inference-max-requests";
  return demand;
}

}  // namespace

void EngineConfig::fields(FieldVisitor& v) {
  v.group("engine");
  v.field({"max_requests", "--inference-max-requests --inference-dynamic-batching-max-requests"},
          max_requests, "requests that run at a time; others wait");
  v.field({"max_seq_length", "--inference-max-seq-length"}, max_seq_length,
          "most tokens of a request, prompt and reply; 0: as many as the model was made for");
  v.field(
      {"cache_gb", "--inference-dynamic-batching-buffer-size-gb"}, cache_gb,
      "GiB for keys and values, at most; 0: what all requests could need, up to 80% of the free "
      "memory of a GPU, or a quarter of the machine's");
  v.field({"swap_gb", "--swap-space-gb"}, swap_gb,
          "GiB of host memory for keys and values of requests that make room for others; without "
          "it they are computed again");
  v.field({"block_size", "--inference-dynamic-batching-block-size"}, block_size,
          "tokens of a block of the cache");
  v.field(
      {"max_step_tokens", "--inference-dynamic-batching-max-tokens"}, max_step_tokens,
      "tokens of a step; longer prompts are read in chunks, beside the replies that are written");
  v.field("max_gap_ms", max_gap_ms,
          "milliseconds that a step, and so the gap between two tokens, should take at most; 0: "
          "any");
  v.field("max_waiting_requests", max_waiting_requests,
          "requests that wait for their first step; more get 429");
  v.field({"prefix_caching", "--inference-dynamic-batching-prefix-caching"}, prefix_caching,
          "requests that begin alike share keys and values");
  v.choice(
      "kv_cache_dtype", kv_cache_dtype, kKvCacheTypes,
      "type of keys and values: auto, that of the activations; fp8, E4M3 with a scale for each "
      "layer and head, which follow from a text that is read at the start");
  v.field({"num_cuda_graphs", "--inference-dynamic-batching-num-cuda-graphs"}, num_cuda_graphs,
          "numbers of rows for which steps run as CUDA graphs, at equal distances up to one for "
          "each request and its drafts, and some more for prompts; -1: those that waste few rows, "
          "0: none");
  v.field("step_timeout_seconds", step_timeout_seconds,
          "a step that takes longer ends the server with an error");
  states.fields(v);
  speculation.fields(v);
}

void EngineConfig::validate(Violations& v) const {
  states.validate(v);
  speculation.validate(v);
  const auto count = [&](const char* flag, int64_t value, int64_t low, int64_t high) {
    v.require(value >= low && value <= high,
              cat(flag, " ", value, " is outside [", low, ", ", high, "]"));
  };
  const auto number = [&](const char* flag, double value) {
    v.require(std::isfinite(value) && value >= 0.0 && value <= 1e6,
              cat(flag, " ", value, " is outside [0, 1e6]"));
  };
  count("--inference-max-requests", max_requests, 1, 65536);
  count("--inference-max-seq-length", max_seq_length, 0, INT32_MAX);
  count("--inference-dynamic-batching-block-size", block_size, 1, 4096);
  count("--inference-dynamic-batching-max-tokens", max_step_tokens, 1, 1 << 20);
  count("--max-waiting-requests", max_waiting_requests, 1, 1 << 20);
  count("--inference-dynamic-batching-num-cuda-graphs", num_cuda_graphs, -1, 65536);
  number("--inference-dynamic-batching-buffer-size-gb", cache_gb);
  number("--swap-space-gb", swap_gb);
  number("--max-gap-ms", max_gap_ms);
  v.require(step_timeout_seconds > 0.0 && step_timeout_seconds <= 1e6,
            cat("--step-timeout-seconds ", step_timeout_seconds, " is outside (0, 1e6]"));
  v.require(max_step_tokens >= max_requests,
            cat("--inference-dynamic-batching-max-tokens ", max_step_tokens,
                " is below --inference-max-requests ", max_requests),
            "each request that runs takes a token of a step");
}

void EngineConfig::check_batch_invariant() const {
  states.check_batch_invariant();
  MEGATRON_CHECK(kv_cache_dtype == KvCacheType::kAuto,
                 "--kv-cache-dtype fp8 rounds keys and values, which training does not: it "
                 "cannot be used in --batch-invariant-mode");
}

EngineOptions engine_options(const EngineConfig& config) {
  EngineOptions options;
  options.scheduler.max_step_tokens = config.max_step_tokens;
  options.scheduler.max_gap_ns = std::llround(config.max_gap_ms * 1e6);
  options.scheduler.max_waiting = config.max_waiting_requests;
  options.scheduler.share_prefixes = config.prefix_caching;
  config.speculation.apply(options.scheduler);
  options.step_timeout_ns = std::llround(config.step_timeout_seconds * 1e9);
  return options;
}

ServedShape served_shape(const EngineConfig& config, const ModelConfig& model, at::ScalarType dtype,
                         bool on_gpu) {
  const TransformerConfig& t = model.transformer;
  ServedShape shape;
  shape.slots = config.max_requests;
  shape.drafts = config.speculation.num_speculative_tokens;
  shape.max_positions = config.max_seq_length > 0       ? config.max_seq_length
                        : t.max_position_embeddings > 0 ? t.max_position_embeddings
                                                        : t.seq_length;
  shape.max_step_tokens = config.max_step_tokens;
  shape.element = static_cast<int64_t>(c10::elementSize(dtype));
  shape.on_gpu = on_gpu;
  shape.max_media = config.max_media;
  shape.keeping = config.states.keeping();
  shape.fp8_cache = config.kv_cache_dtype == KvCacheType::kFp8;
  shape.keeping.drafts = shape.drafts;
  if (const std::vector<int64_t> sizes = served_graph_sizes(config, shape); !sizes.empty())
    shape.graph_rows = sizes.back();
  return shape;
}

std::vector<int64_t> served_graph_sizes(const EngineConfig& config, const ServedShape& shape) {
  if (!shape.on_gpu) return {};
  std::vector<int64_t> sizes =
      graph_sizes(config.num_cuda_graphs, shape.slots * (1 + shape.drafts));
  if (sizes.empty()) return sizes;
  for (int64_t rows = kPromptGraphDistance;
       rows <= std::min(kPromptGraphRows, shape.max_step_tokens); rows += kPromptGraphDistance)
    if (rows > sizes.back()) sizes.push_back(rows);
  return sizes;
}

CachePlan served_cache(const EngineConfig& config, const ModelConfig& model,
                       const ServedShape& shape, const StageSlice& slice, int64_t budget) {
  if (config.cache_gb > 0.0) budget = static_cast<int64_t>(config.cache_gb * kFlagGiB);
  KeptBytes kept =
      kept_bytes(model, slice, shape.tensor_ranks, shape.element, shape.keeping, shape.fp8_cache);
  if (slice.first_layer == 0) kept += shape.draft.kept;
  return plan_cache(kept, cache_demand(config, shape), budget);
}

}  // namespace megatron
