#include "megatron/inference/model_service.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <set>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/datasets/tuning/text_to_text.h"
#include "megatron/reporting/build_commit.h"

namespace megatron {
namespace {

constexpr int64_t kStopNs = 5'000'000'000;

EngineOptions options_of(const ModelServiceOptions& options, ServedRank& rank) {
  EngineOptions engine = engine_options(options.engine);
  if (auto drafts = rank.drafts()) engine.scheduler.draft_source = std::move(drafts);
  engine.max_choices = static_cast<int32_t>(options.limits.max_choices);
  engine.max_stop_texts = static_cast<int32_t>(options.limits.max_stop_texts);
  engine.max_stop_text_bytes = options.limits.max_stop_text_bytes;
  engine.max_logit_bias = static_cast<int32_t>(options.limits.max_logit_bias);
  engine.build = build_commit();
  engine.when_idle = [&rank] { return rank.warm_up_some(); };
  return engine;
}

std::string folder_name(std::filesystem::path folder) {
  folder = std::filesystem::absolute(folder).lexically_normal();
  return folder.has_filename() ? folder.filename() : folder.parent_path().filename();
}

}  // namespace

ModelService::ModelService(std::unique_ptr<ServedRank> rank, std::unique_ptr<FollowerLinks> links,
                           const ModelServiceOptions& options)
    : rank_(std::move(rank)),
      links_(std::move(links)),
      engine_(rank_->runner(), links_.get(), rank_->loaded().tokenizer.get(), clock_,
              options_of(options, *rank_)),
      thread_(engine_) {
  describe(options);
}

ModelService::~ModelService() { thread_.stop(); }

void ModelService::describe(const ModelServiceOptions& options) {
  const LoadedModel& loaded = rank_->loaded();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  served_.name = options.name.empty() ? folder_name(rank_->request().load) : options.name;
  for (const auto& [name, folder] : options.adapters) served_.adapters.push_back(name);
  served_.created = std::time(nullptr);
  served_.tokenizer = &tokenizer;
  served_.limits = engine_.limits();
  if (loaded.model->sequence_input() == SequenceInputUse::kRequired) describe_encoder();
  std::set<int32_t> ends(loaded.end_of_text.begin(), loaded.end_of_text.end());
  if (const auto eod = tokenizer.eod()) ends.insert(*eod);
  for (const int32_t id : ends)
    MEGATRON_CHECK(id >= 0 && id < served_.limits.vocab_size, "the end token ", id,
                   " is outside the vocabulary, 0 to ", served_.limits.vocab_size - 1,
                   "\nhint: it comes from generation_config.json, config.json or the tokenizer");
  served_.end_tokens = served_.chat_end_tokens = {ends.begin(), ends.end()};
  if (ends.empty())
    log_warning("model and tokenizer name no end token: replies end by their length alone");
  describe_chat(options);
  describe_media(options);
  ends.insert(served_.chat_end_tokens.begin(), served_.chat_end_tokens.end());
  grammars_.emplace(tokenizer, served_.limits.vocab_size,
                    std::vector<int32_t>(ends.begin(), ends.end()));
  served_.grammars = &*grammars_;
}

void ModelService::describe_encoder() {
  const LoadedModel& loaded = rank_->loaded();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  EncoderPrompts& encoder = served_.encoder.emplace();
  encoder.decoder_start =
      loaded.decoder_start ? *loaded.decoder_start : decoder_start_of(tokenizer);
  encoder.end = loaded.end_of_text.empty() ? tokenizer.eod() : loaded.end_of_text.front();
  encoder.max_tokens = loaded.config.transformer.seq_length;
}

void ModelService::describe_chat(const ModelServiceOptions& options) {
  const LoadedModel& loaded = rank_->loaded();
  try {
    chat_.emplace(*loaded.tokenizer,
                  options.chat_templates.empty() ? loaded.chat_templates : options.chat_templates,
                  options.chat_template, loaded.end_of_text);
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

void ModelService::describe_media(const ModelServiceOptions& options) {
  const LoadedModel& loaded = rank_->loaded();
  const ModelConfig& config = loaded.config;
  if (!reads_media(config, MediaKind::kImage) && !reads_media(config, MediaKind::kSound)) return;
  std::string why_not = options.why_no_media;
  if (why_not.empty() && !chat_)
    why_not = cat("the model has no chat template: ", served_.why_no_template);
  if (why_not.empty()) {
    MediaLimits limits;
    limits.max_image_pixels = options.limits.max_image_pixels;
    limits.max_file_bytes = options.limits.max_medium_bytes;
    media_.emplace(*loaded.model, rank_->weights(), *loaded.tokenizer, *chat_,
                   options.media_folders, options.chat_template, limits);
    if (options.engine.num_cuda_graphs != 0) media_->use_graphs();
  } else {
    log_warning(cat("images and sounds are refused: ", why_not));
    media_.emplace(config, why_not);
  }
  served_.media = &*media_;
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

void ModelService::stop() {
  if (links_ != nullptr) {
    // The engine tells the other ranks; one that has failed has told them.
    engine_.command(DrainCommand{}, 0);
    const int64_t end = clock_.now_ns() + kStopNs;
    while (engine_.stats().state != EngineState::kStopped &&
           engine_.stats().state != EngineState::kFailed && clock_.now_ns() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  thread_.stop();
}

}  // namespace megatron
