// What load is sent to: a server by HTTP, or an engine of this process.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/scheduling/clock.h"
#include "megatron/serving/bench/load_generator.h"
#include "megatron/serving/http/sse.h"

namespace megatron {
namespace {

class HttpTarget final : public LoadTarget {
 public:
  HttpTarget(const HttpUrl& url, const std::string& ca_file, const std::string& key,
             std::string model)
      : client_(url, ca_file), model_(std::move(model)) {
    headers_ = {{"Content-Type", "application/json"}};
    if (!key.empty()) headers_.push_back({"Authorization", "Bearer " + key});
    if (model_.empty()) {
      const auto models = get(url, ca_file, "/v1/models");
      MEGATRON_CHECK(models.contains("data") && models["data"].is_array() &&
                         !models["data"].empty() && models["data"][0].contains("id"),
                     "GET /v1/models lists no model\nhint: name one with --model");
      model_ = models["data"][0]["id"];
    }
    // Servers that do not tell get ids that every vocabulary has.
    const auto info = get(url, ca_file, "/tokenizer_info");
    if (info.contains("vocab_size") && info["vocab_size"].is_number_integer())
      vocab_size_ = std::max<int32_t>(2, info["vocab_size"].get<int32_t>());
  }

  std::pair<int32_t, int32_t> prompt_ids() const override {
    // The first ids are often special ones.
    return {vocab_size_ > 1024 ? 256 : 0, vocab_size_ - (vocab_size_ > 1024 ? 64 : 1)};
  }

  void start(std::vector<int32_t> prompt, const ClientLoad& options, uint64_t seed,
             Callbacks callbacks) override {
    struct Open {
      Callbacks callbacks;
      SseReader events;
      int status = 0;
      std::string body, problem;
      int64_t prompt_tokens = 0, output_tokens = 0;
      bool done = false;
    };
    auto open = std::make_shared<Open>();
    open->callbacks = std::move(callbacks);
    HttpCall call;
    call.method = "POST";
    call.path = "/v1/completions";
    call.headers = headers_;
    call.timeout_ns = options.request_timeout_ns;
    JsonWriter json;
    json.begin_object()
        .member("model", model_)
        .member("prompt", prompt)
        .member("max_tokens", options.output_tokens)
        .member("temperature", options.temperature)
        .member("seed", seed)
        .member("ignore_eos", options.ignore_eos)
        .member("stream", true)
        .key("stream_options")
        .begin_object()
        .member("include_usage", true)
        .end_object();
    call.body = json.end_object().text();
    call.on_head = [open](int status, const std::vector<HttpHeader>&) { open->status = status; };
    call.on_body = [open](std::string_view piece) {
      if (open->status != 200) {
        open->body += piece;
        return;
      }
      open->events.push(piece, [&](std::string_view, std::string_view data) {
        if (data == "[DONE]") {
          open->done = true;
          return;
        }
        const auto chunk = nlohmann::json::parse(data, nullptr, false);
        if (!chunk.is_object()) return;
        if (chunk.contains("error")) open->problem = chunk["error"].value("message", "an error");
        if (chunk.contains("usage") && chunk["usage"].is_object()) {
          open->prompt_tokens = chunk["usage"].value("prompt_tokens", int64_t{0});
          open->output_tokens = chunk["usage"].value("completion_tokens", int64_t{0});
        }
        // Tokens may end within a character, and have no text yet.
        if (chunk.contains("choices") && !chunk["choices"].empty()) open->callbacks.on_piece(0);
      });
    };
    call.on_done = [open](const std::string& problem) {
      if (open->problem.empty()) open->problem = problem;
      if (open->problem.empty() && open->status != 200)
        open->problem = cat("status ", open->status, ": ", open->body.substr(0, 300));
      if (open->problem.empty() && !open->done) open->problem = "the stream ended without [DONE]";
      open->callbacks.on_end(open->prompt_tokens, open->output_tokens, open->problem);
    };
    client_.start(std::move(call));
  }
  void after(int64_t ns, std::function<void()> work) override {
    client_.after(ns, std::move(work));
  }
  void run() override { client_.run(); }

 private:
  nlohmann::json get(const HttpUrl& url, const std::string& ca_file, const char* path) const {
    const HttpResponse response =
        fetch(url, {.path = path, .headers = headers_, .timeout_ns = 30'000'000'000}, ca_file);
    MEGATRON_CHECK(response.status != 401, "the server asks for an API key\nhint: --api-key-file");
    if (response.status != 200) return nlohmann::json::object();
    return nlohmann::json::parse(response.body, nullptr, false);
  }

  HttpClient client_;
  std::string model_;
  std::vector<HttpHeader> headers_;
  int32_t vocab_size_ = 1000;
};

class EngineTarget final : public LoadTarget {
 public:
  EngineTarget(EngineService& engine, int64_t vocab_size)
      : engine_(engine), vocab_size_(static_cast<int32_t>(vocab_size)) {
    engine.set_listener([this](std::vector<Event> events) {
      const std::lock_guard lock(mutex_);
      std::move(events.begin(), events.end(), std::back_inserter(events_));
      changed_.notify_one();
    });
  }

  std::pair<int32_t, int32_t> prompt_ids() const override {
    return {vocab_size_ > 1024 ? 256 : 0, vocab_size_ - (vocab_size_ > 1024 ? 64 : 1)};
  }
  void start(std::vector<int32_t> prompt, const ClientLoad& options, uint64_t seed,
             Callbacks callbacks) override {
    RequestSpec spec;
    spec.prompt = std::move(prompt);
    spec.sampling.temperature = options.temperature;
    spec.sampling.seed = seed;
    spec.stop.max_tokens = options.output_tokens;
    spec.timeout_ns = options.request_timeout_ns;
    const Admission admission = engine_.submit(std::move(spec));
    if (admission.id)
      open_[*admission.id] = std::move(callbacks);
    else
      works_.emplace(
          0, [end = callbacks.on_end, why = admission.refusal->message] { end(0, 0, why); });
  }
  void after(int64_t ns, std::function<void()> work) override {
    works_.emplace(clock_.now_ns() + ns, std::move(work));
  }
  void run() override {
    while (!open_.empty() || !works_.empty()) {
      std::deque<Event> events;
      {
        std::unique_lock lock(mutex_);
        const int64_t wait = works_.empty() ? 100'000'000 : works_.begin()->first - clock_.now_ns();
        if (events_.empty() && wait > 0)
          changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(wait, 100'000'000)));
        events.swap(events_);
      }
      for (const Event& event : events) take(event);
      while (!works_.empty() && works_.begin()->first <= clock_.now_ns()) {
        const auto work = std::move(works_.begin()->second);
        works_.erase(works_.begin());
        work();
      }
    }
  }

 private:
  void take(const Event& event) {
    const auto found = open_.find(event.request);
    if (found == open_.end()) return;
    if (!event.tokens.empty()) found->second.on_piece(static_cast<int64_t>(event.tokens.size()));
    if (!event.finish) return;
    const Callbacks callbacks = std::move(found->second);
    open_.erase(found);
    const Finish& finish = *event.finish;
    callbacks.on_end(finish.usage.prompt_tokens, finish.usage.output_tokens,
                     is_complete(finish.reason) ? "" : cat("ended by ", name(finish.reason)));
  }

  EngineService& engine_;
  int32_t vocab_size_;
  MonotonicClock clock_;
  std::map<RequestId, Callbacks> open_;
  std::multimap<int64_t, std::function<void()>> works_;  // by the time when they are due
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
};

}  // namespace

std::unique_ptr<LoadTarget> make_http_target(const HttpUrl& url, const std::string& ca_file,
                                             const std::string& key, const std::string& model) {
  return std::make_unique<HttpTarget>(url, ca_file, key, model);
}

std::unique_ptr<LoadTarget> make_engine_target(EngineService& engine, int64_t vocab_size) {
  return std::make_unique<EngineTarget>(engine, vocab_size);
}

}  // namespace megatron
