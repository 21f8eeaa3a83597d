#include "megatron/inference/model_service.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <set>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/reporting/build_commit.h"

namespace megatron {
namespace {

constexpr double kGiB = 1 << 30;

// Bytes that the cache may take where no flag says so.
int64_t cache_budget(at::Device device) {
  if (!device.is_cpu()) {
    const size_t free = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first;
    return static_cast<int64_t>(0.8 * static_cast<double>(free));
  }
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, unit))
    if (name == "MemAvailable:") return kib * 1024 / 4;
  return int64_t{4} << 30;
}

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
  const TransformerConfig& t = loaded_.config.transformer;
  RunnerOptions options;
  options.slots = static_cast<int32_t>(config.max_requests);
  options.block_size = config.block_size;
  options.adapters = adapters_.empty() ? nullptr : &adapters_;
  options.max_positions = config.max_seq_length > 0       ? config.max_seq_length
                          : t.max_position_embeddings > 0 ? t.max_position_embeddings
                                                          : t.seq_length;
  options.device_blocks = 1;
  int64_t each = 0, states = 0;
  {
    const ModelRunner trial(*loaded_.model, weights_, options);
    each = trial.block_bytes();
    states = trial.cache_bytes() - each;
  }
  const int64_t budget = config.cache_gb > 0.0 ? static_cast<int64_t>(config.cache_gb * kGiB)
                                               : cache_budget(request_.device);
  const int64_t needed =
      config.max_requests * ((options.max_positions + config.block_size - 1) / config.block_size);
  const int64_t blocks =
      std::min({needed, (budget - states) / std::max<int64_t>(1, each), int64_t{INT32_MAX}});
  MEGATRON_CHECK(blocks >= 1, "a cache of ", format_fixed(static_cast<double>(budget) / kGiB, 2),
                 " GiB holds no block of ", config.block_size, " tokens, which takes ", each,
                 " bytes beside ", states,
                 " bytes of states\nhint: raise --inference-dynamic-batching-buffer-size-gb, or "
                 "lower --inference-dynamic-batching-block-size");
  options.device_blocks = static_cast<int32_t>(blocks);
  if (config.swap_gb > 0.0) {
    options.host_blocks = static_cast<int32_t>(
        std::min(config.swap_gb * kGiB / static_cast<double>(std::max<int64_t>(1, each)), 1e9));
    options.host_states = options.slots;
  }
  auto runner = std::make_unique<ModelRunner>(*loaded_.model, weights_, options);
  log_info(cat("cache: ", blocks * config.block_size, " tokens in blocks of ", config.block_size,
               ", ", format_fixed(static_cast<double>(runner->cache_bytes()) / kGiB, 2),
               " GiB; up to ", options.slots, " requests at a time, of ", options.max_positions,
               " tokens at most"));
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
