#include "megatron/inference/model_service.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <set>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/reporting/build_commit.h"

namespace megatron {
namespace {

constexpr double kGiB = 1 << 30;

EngineOptions options_of(const ModelServiceOptions& options) {
  EngineOptions engine = engine_options(options.engine);
  engine.max_choices = static_cast<int32_t>(options.limits.max_choices);
  engine.max_stop_texts = static_cast<int32_t>(options.limits.max_stop_texts);
  engine.max_stop_text_bytes = options.limits.max_stop_text_bytes;
  engine.max_logit_bias = static_cast<int32_t>(options.limits.max_logit_bias);
  engine.build = build_commit();
  return engine;
}

std::string folder_name(std::filesystem::path folder) {
  folder = std::filesystem::absolute(folder).lexically_normal();
  return folder.has_filename() ? folder.filename() : folder.parent_path().filename();
}

}  // namespace

ModelService::ModelService(LoadModelRequest request, LoadedModel loaded,
                           const ModelServiceOptions& options)
    : request_(std::move(request)),
      loaded_(std::move(loaded)),
      adapters_(load_adapters(loaded_, options.adapters)),
      weights_(
          *loaded_.store, [this](const std::string& source) { return read_other_weights(source); },
          loaded_.directory.string()),
      runner_(make_runner(options.engine)),
      engine_(*runner_, nullptr, loaded_.tokenizer.get(), clock_, options_of(options)),
      thread_(engine_) {
  describe(options);
}

ModelService::~ModelService() { stop(); }

std::vector<at::Tensor> ModelService::read_other_weights(const std::string& source) {
  LoadModelRequest request = request_;
  request.load = source;
  request.ckpt_step.reset();
  return read_weights(request, *loaded_.model);
}

std::unique_ptr<ModelRunner> ModelService::make_runner(const EngineConfig& config) {
  const ServedShape shape = served_shape(config, loaded_.config, loaded_.dtype,
                                         /*on_gpu=*/!request_.device.is_cpu());
  ServingMemory memory = serving_memory(loaded_.config, shape, /*stage=*/0);
  memory.weights = loaded_.store->bytes();
  const int64_t budget = config.cache_gb > 0.0 ? static_cast<int64_t>(config.cache_gb * kGiB)
                                               : cache_budget(request_.device, memory.step());
  const KeptBytes kept = kept_bytes(loaded_.config, memory.slice, 1, shape.element);
  memory.cache = plan_cache(kept, cache_demand(config, shape), budget);
  RunnerOptions options;
  options.slots = static_cast<int32_t>(shape.slots);
  options.block_size = config.block_size;
  options.adapters = adapters_.empty() ? nullptr : &adapters_;
  options.max_positions = shape.max_positions;
  options.device_blocks = memory.cache.blocks;
  if (config.swap_gb > 0.0) {
    const auto each = static_cast<double>(std::max<int64_t>(1, memory.cache.block_bytes));
    options.host_blocks = static_cast<int32_t>(std::min(config.swap_gb * kGiB / each, 1e9));
    options.host_states = options.slots;
  }
  auto runner = std::make_unique<ModelRunner>(*loaded_.model, weights_, options);
  MEGATRON_ASSERT(runner->cache_bytes() == memory.cache.bytes(), "the cache has ",
                  runner->cache_bytes(), " bytes, planned were ", memory.cache.bytes(),
                  ": a kind of layers keeps other states than its cost says");
  log_info(cat("cache: ", memory.cache.blocks * config.block_size, " tokens in blocks of ",
               config.block_size, "; up to ", options.slots, " requests at a time, of ",
               options.max_positions, " tokens at most"));
  log_info(memory.text());
  return runner;
}

void ModelService::describe(const ModelServiceOptions& options) {
  const Tokenizer& tokenizer = *loaded_.tokenizer;
  served_.name = options.name.empty() ? folder_name(request_.load) : options.name;
  for (const auto& [name, folder] : options.adapters) served_.adapters.push_back(name);
  served_.created = std::time(nullptr);
  served_.tokenizer = &tokenizer;
  served_.limits = engine_.limits();
  std::set<int32_t> ends(loaded_.end_of_text.begin(), loaded_.end_of_text.end());
  if (const auto eod = tokenizer.eod()) ends.insert(*eod);
  for (const int32_t id : ends)
    MEGATRON_CHECK(id >= 0 && id < served_.limits.vocab_size, "the end token ", id,
                   " is outside the vocabulary, 0 to ", served_.limits.vocab_size - 1,
                   "\nhint: it comes from generation_config.json, config.json or the tokenizer");
  served_.end_tokens = served_.chat_end_tokens = {ends.begin(), ends.end()};
  if (ends.empty())
    log_warning("model and tokenizer name no end token: replies end by their length alone");
  describe_chat(options);
  ends.insert(served_.chat_end_tokens.begin(), served_.chat_end_tokens.end());
  grammars_.emplace(tokenizer, served_.limits.vocab_size,
                    std::vector<int32_t>(ends.begin(), ends.end()));
  served_.grammars = &*grammars_;
}

void ModelService::describe_chat(const ModelServiceOptions& options) {
  try {
    chat_.emplace(*loaded_.tokenizer, loaded_.chat_templates, options.chat_template,
                  loaded_.end_of_text);
  } catch (const Error& error) {
    if (!options.chat_template.empty()) throw;
    served_.why_no_template =
        std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
    log_info(cat(served_.why_no_template, ": conversations are refused, texts are continued"));
    return;
  }
  served_.chat_end_tokens = chat_->stop_tokens();
  served_.chat_template = &chat_->chat_template();
  served_.tool_template = &chat_->tool_template();
  served_.tool_format = tool_format(options.tool_call_parser, chat_->tool_template().source());
}

void ModelService::start() {
  thread_.start();
  for (;;) {
    const EngineStats stats = engine_.stats();
    MEGATRON_CHECK(stats.state != EngineState::kFailed, "the engine has failed: ", stats.failure);
    if (stats.state != EngineState::kStarting) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace megatron
