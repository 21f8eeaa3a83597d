// The server: routes of the OpenAI API, of Megatron-LM's and of operators, over an engine.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/serving/generation.h"
#include "megatron/serving/request_guard.h"
#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"
#include "megatron/serving/service.h"
#include "megatron/serving/worker_pool.h"

namespace megatron {

// Who may call a route, besides having a key where keys are asked for.
enum class RouteAccess { kAnyClient, kAdmin };

// One line of the table of routes.
struct RouteInfo {
  std::string_view method, path;
  RouteAccess access = RouteAccess::kAnyClient;
  std::string_view summary;
};
std::vector<RouteInfo> all_routes();

class ApiServer final : private HttpHandler {
 public:
  // Listens at once. `engine` and `model` must outlive it. Throws UsageError: neither loopback nor
  // keys nor --no-auth; Error: the port is in use, files of keys or certificates.
  ApiServer(const ServeConfig& config, const ServeLimits& limits, EngineService& engine,
            const ServedModel& model);
  ~ApiServer() override;

  // Throws what the constructor would throw, so that a model is not loaded in vain.
  static void check(const ServeConfig& config, const ServeLimits& limits);

  void start();
  int port() const;
  std::string url() const;  // "http://127.0.0.1:8000"

  // Refuses new requests, lets those in flight end until the deadline, then cuts them off. Returns
  // how many were cut off.
  size_t drain(int64_t timeout_ns);
  void stop();

  HttpCounts counts() const;
  // Requests for text whose last event has not come.
  size_t num_open() const;

 private:
  struct Call;

  std::optional<HttpResponse> refuse(const HttpRequest& head) override;
  void handle(std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse fault_response(int status, std::string_view message) override;

  std::optional<ApiError> check_access(const HttpRequest& head) const;
  void generate(Call call, Endpoint endpoint);
  HttpResponse simple_answer(const Call& call) const;
  HttpResponse page() const;
  HttpResponse health(bool ready) const;
  HttpResponse models(const Call& call) const;
  HttpResponse metrics() const;
  HttpResponse tokenize(const Call& call) const;
  HttpResponse detokenize(const Call& call) const;
  void command(Call call);
  // Runs `answer` on a worker; an exception becomes the response.
  void answer_later(Call call, std::function<HttpResponse()> answer);
  void respond(const Call& call, HttpResponse response);

  const ServeConfig config_;
  const ServeLimits limits_;
  EngineService& engine_;
  const ServedModel& model_;
  ApiKeys keys_;
  HostRules host_rules_;
  ResponseCounts responses_;
  std::atomic<bool> draining_{false};
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<EventRouter> router_;
  std::unique_ptr<WorkerPool> workers_;
};

// The chat page, one file that loads nothing, and the Content-Security-Policy that holds it to
// that.
std::string_view chat_page();
std::string_view chat_page_policy();

}  // namespace megatron
