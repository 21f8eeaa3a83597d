#include "megatron/inference/served_rank.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/reference_notes.h"

namespace megatron {
namespace {

constexpr double kSwapGiB = 1 << 30;

// The fewest blocks that a rank of the model has room for.
int32_t fewest_blocks(int32_t own, const ParallelGroups& groups, at::Device device) {
  if (groups.world.size() == 1) return own;
  const at::Tensor fewest = at::full({1}, -int64_t{own}, at::dtype(at::kLong).device(device));
  groups.world.all_reduce(fewest, ReduceOp::kMax)->wait();
  return static_cast<int32_t>(-fewest.item<int64_t>());
}

constexpr std::string_view kCalibrationText =
    "The harbour froze in the winter of 1897, and for eleven weeks no ship could leave. Letters "
    "went "
    "over the ice by sledge; the price of salt rose from 3.20 to 14.75, then fell again. \"We had "
    "bread,\" the pilot's daughter wrote, \"but nobody knew for how long.\"\n\n"
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise "
    "ValueError('empty')\n    return sum(values) / len(values)  # O(n)\n\n"
    "Q: Which of these is larger, 7/8 or 0.85?\nA: 7/8 = 0.875, so it is larger by 0.025.\n\n"
    "El puerto se helo aquel invierno. Der Hafen war zugefroren; niemand wusste, wie lange. "
    "{\"id\": 42, \"tags\": [\"ice\", \"salt\"], \"open\": false}\n"
    "Take two cups of flour, a pinch of salt and 150 ml of warm water; knead for ten minutes, then "
    "let the dough rest. Meanwhile, chop the onions. Finally, if x > 0 and y < 0, then x * y < 0.";

// Whether tokens are spelled as their ids, as NullTokenizer's are: it reads no words.
bool spells_ids(const Tokenizer& tokenizer) {
  constexpr int32_t kLooked = 3;
  if (tokenizer.vocab_size() < kLooked) return false;
  for (int32_t id = 0; id < kLooked; ++id)
    if (tokenizer.id_to_token(id) != std::to_string(id)) return false;
  return true;
}

// Ids from which the scales of an FP8 cache follow: of a text, else from all over the vocabulary.
std::vector<int32_t> calibration_ids(const LoadedModel& loaded, int64_t most) {
  std::vector<int32_t> ids;
  if (!spells_ids(*loaded.tokenizer)) {
    ids = loaded.tokenizer->encode(kCalibrationText);
  } else {
    constexpr int64_t kIds = 256, kStride = 7919;
    for (int64_t i = 0; i < kIds; ++i)
      ids.push_back(static_cast<int32_t>(i * kStride % loaded.config.vocab_size));
  }
  ids.resize(std::min<size_t>(ids.size(), static_cast<size_t>(most)));
  return ids;
}

DraftModelOptions draft_options(const EngineConfig& config, int64_t vocab_size) {
  return {.vocab_size = vocab_size,
          .max_step_tokens = config.max_step_tokens,
          .share_prefixes = config.prefix_caching,
          .step_timeout_ns = std::llround(config.step_timeout_seconds * 1e9)};
}

}  // namespace

ServedRank::ServedRank(LoadModelRequest request, LoadedModel loaded, const EngineConfig& config,
                       const AdapterFolders& adapters, int local_ranks,
                       std::unique_ptr<LoadedDraft> draft)
    : request_(std::move(request)),
      loaded_(std::move(loaded)),
      adapters_(load_adapters(loaded_, adapters)),
      weights_(
          *loaded_.store, [this](const std::string& source) { return read_other_weights(source); },
          loaded_.directory.string()) {
  make_runner(config, local_ranks, std::move(draft));
}

void ServedRank::warm_up() {
  const auto begin = std::chrono::steady_clock::now();
  bool any = false;
  while (runner_->warm_up_some()) any = true;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (any) log_info(cat("warmed up in ", format_fixed(seconds.count(), 2), " s"));
}

std::vector<at::Tensor> ServedRank::read_other_weights(const std::string& source) {
  LoadModelRequest request = request_;
  request.load = source;
  request.ckpt_step.reset();
  request.dummy_weights = false;
  return read_weights(request, *loaded_.model);
}

void ServedRank::make_runner(const EngineConfig& config, int local_ranks,
                             std::unique_ptr<LoadedDraft> draft) {
  const ParallelGroups& groups = loaded_.model->groups();
  const bool on_gpu = !request_.device.is_cpu();
  ServedShape shape = served_shape(config, loaded_.config, loaded_.dtype, on_gpu);
  shape.int8 = request_.int8;
  shape.tensor_ranks = groups.tp.size();
  shape.stages = groups.pp.size();
  if (draft) shape.draft = draft_memory(draft->loaded().config, draft->loaded().dtype, shape);
  ServingMemory memory = serving_memory(loaded_.config, shape, groups.pp.rank());
  // The first forward makes quantised copies, and frees what they are copies of.
  const int64_t coming = std::max<int64_t>(0, memory.weights - loaded_.store->bytes());
  if (!request_.fp8 && !request_.int8) memory.weights = loaded_.store->bytes();
  const int64_t budget = cache_budget(request_.device, memory.passing() + coming) /
                         (on_gpu ? 1 : std::max(1, local_ranks));
  memory.cache = served_cache(config, loaded_.config, shape, memory.slice, budget);
  memory.cache.blocks = fewest_blocks(memory.cache.blocks, groups, request_.device);
  if (const auto free = free_memory(request_.device)) memory.check_fits(*free - coming);
  RunnerOptions options;
  options.slots = static_cast<int32_t>(shape.slots);
  options.block_size = config.block_size;
  options.adapters = adapters_.empty() ? nullptr : &adapters_;
  options.max_positions = shape.max_positions;
  options.keeping = shape.keeping;
  options.fp8_cache = shape.fp8_cache;
  if (options.fp8_cache) options.calibration = calibration_ids(loaded_, shape.max_positions);
  options.device_blocks = memory.cache.blocks;
  options.most_rows = shape.max_step_tokens;
  options.graph_sizes = served_graph_sizes(config, shape);
  if (config.swap_gb > 0.0) {
    const auto each = static_cast<double>(std::max<int64_t>(1, memory.cache.block_bytes));
    const double blocks = std::min(config.swap_gb * kSwapGiB / each, 1e9);
    options.host_blocks = fewest_blocks(static_cast<int32_t>(blocks), groups, request_.device);
    options.host_states = options.slots;
  }
  runner_ = std::make_unique<ModelRunner>(*loaded_.model, weights_, options);
  if (request_.int8) runner_->run_first_forward();
  runner_->plan_warm_up(shape.max_step_tokens);
  hold_memory(request_.device, memory.eager());
  if (!warms_up_while_idle()) warm_up();
  served_ = runner_.get();
  int64_t cache = runner_->cache_bytes();
  if (draft) {
    options.adapters = nullptr;
    options.keeping = {};
    options.fp8_cache = false;
    options.host_blocks = options.host_states = 0;
    options.graph_sizes.clear();
    options.most_rows = 0;
    draft_ = std::make_unique<ServedDraft>(std::move(draft), options,
                                           draft_options(config, loaded_.config.vocab_size));
    cache += draft_->runner().cache_bytes();
    served_ = &both_.emplace(*runner_, draft_->runner(), *draft_->drafts());
  }
  MEGATRON_ASSERT(cache == memory.cache.bytes(), "the cache has ", cache, " bytes, planned were ",
                  memory.cache.bytes(), ": a kind of layers keeps other states than its cost says");
  log_info(cat("cache: ", memory.cache.blocks * config.block_size, " tokens in blocks of ",
               config.block_size, "; up to ", options.slots, " requests at a time, of ",
               options.max_positions, " tokens at most"));
  log_info(memory.text());
  if (on_gpu && groups.world.rank() == 0)
    for (const std::string& note :
         reference_notes(loaded_.config.transformer, shape.tensor_ranks, loaded_.dtype,
                         ssm_kernels::has_scans(), /*training=*/false))
      log_warning(note);
}

}  // namespace megatron
