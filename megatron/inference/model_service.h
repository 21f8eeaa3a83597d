// A model that is served, on rank 0: its engine with the engine's thread, and what the server must
// know of it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "megatron/inference/chat.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/engine_config.h"
#include "megatron/inference/engine_thread.h"
#include "megatron/inference/grammar.h"
#include "megatron/inference/images/served_media.h"
#include "megatron/inference/served_rank.h"
#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"

namespace megatron {

struct ModelServiceOptions {
  EngineConfig engine;
  ServeLimits limits;
  std::string name;               // of the model, for clients; empty: that of its folder
  std::string chat_template;      // a file or the template itself; empty: the tokenizer's
  TemplateSource chat_templates;  // in place of the tokenizer's; empty: those
  std::string tool_call_parser = "auto";
  // Of a model that reads media; empty: there are none, and why.
  MediaFolders media_folders;
  std::string why_no_media;
  AdapterFolders adapters;
};

class ModelService {
 public:
  // `links`: to the other ranks, which follow() it; null: there are none. Throws Error if the chat
  // template is wrong.
  ModelService(std::unique_ptr<ServedRank> rank, std::unique_ptr<FollowerLinks> links,
               const ModelServiceOptions& options);
  ~ModelService();

  const ServedModel& model() const { return served_; }
  EngineService& engine() { return thread_; }
  const ServedRank& rank() const { return *rank_; }

  // Before start(): does at once what the engine would do while no request waits. Seconds.
  void warm_up() { rank_->warm_up(); }
  // Runs the engine, and returns when it takes requests. Throws Error if it fails instead.
  void start();
  // Requests in flight end; the other ranks leave.
  void stop();
  // From now on the engine says that it has failed, whatever it waits in. Any thread.
  void fail(const std::string& message) { thread_.fail(message); }

 private:
  void describe(const ModelServiceOptions& options);
  void describe_encoder();
  void describe_chat(const ModelServiceOptions& options);
  void describe_media(const ModelServiceOptions& options);

  const std::unique_ptr<ServedRank> rank_;
  const std::unique_ptr<FollowerLinks> links_;
  MonotonicClock clock_;
  Engine engine_;
  EngineThread thread_;
  std::optional<Chat> chat_;
  std::optional<ServedMedia> media_;
  std::optional<GrammarCompiler> grammars_;
  ServedModel served_;
};

}  // namespace megatron
