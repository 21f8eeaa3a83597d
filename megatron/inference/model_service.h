// A model that is served: weights, adapters, cache, engine and its thread, and what the server
// must know of it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/inference/adapters.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/engine_config.h"
#include "megatron/inference/engine_thread.h"
#include "megatron/inference/grammar.h"
#include "megatron/inference/model_runner.h"
#include "megatron/inference/served_weights.h"
#include "megatron/interop/load_model.h"
#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"

namespace megatron {

struct ModelServiceOptions {
  EngineConfig engine;
  ServeLimits limits;
  std::string name;           // of the model, for clients; empty: that of its folder
  std::string chat_template;  // a file or the template itself; empty: the tokenizer's
  std::string tool_call_parser = "auto";
  std::vector<std::pair<std::string, std::filesystem::path>> adapters;  // name, PEFT folder
};

class ModelService {
 public:
  // `request`: by which `loaded` was loaded, on one rank; other weights are read in the same way.
  // Allocates the cache. Throws Error: the model cannot be decoded, the cache holds nothing,
  // adapters or the chat template are wrong.
  ModelService(LoadModelRequest request, LoadedModel loaded, const ModelServiceOptions& options);
  ~ModelService();

  const ServedModel& model() const { return served_; }
  EngineService& engine() { return thread_; }
  int64_t cache_bytes() const { return runner_->cache_bytes(); }

  // Runs the engine, and returns when it takes requests. Throws Error if it fails instead.
  void start();
  void stop() { thread_.stop(); }

 private:
  std::vector<at::Tensor> read_other_weights(const std::string& source);
  std::unique_ptr<ModelRunner> make_runner(const EngineConfig& config);
  void describe(const ModelServiceOptions& options);
  void describe_chat(const ModelServiceOptions& options);

  const LoadModelRequest request_;
  LoadedModel loaded_;
  AdapterList adapters_;
  ServedWeights weights_;
  std::unique_ptr<ModelRunner> runner_;
  MonotonicClock clock_;
  Engine engine_;
  EngineThread thread_;
  std::optional<Chat> chat_;
  std::optional<GrammarCompiler> grammars_;
  ServedModel served_;
};

}  // namespace megatron
