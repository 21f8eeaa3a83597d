#include "megatron/serving/api_server.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <iterator>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/reporting/build_commit.h"
#include "megatron/serving/detail/engine_commands.h"
#include "megatron/serving/detail/log_probability_json.h"
#include "megatron/serving/detail/tokenizer_routes.h"

namespace megatron {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// What a route does.
enum class Action {
  kPage,
  kHealth,
  kAlive,
  kMetrics,
  kModels,
  kCompletions,
  kChat,
  kApi,
  kTokenize,
  kDetokenize,
  kTokenizerInfo,
  kVersion,
  kStatus,
  kCommand,
  kProfile
};

struct Route {
  std::string_view method, path;
  Action action;
  std::string_view summary;
  RouteAccess access = RouteAccess::kAnyClient;
};

// A path that ends in "/*" stands for all that begin so.
constexpr Route kRoutes[] = {
    {"GET", "/", Action::kPage, "the chat page"},
    {"POST", "/v1/chat/completions", Action::kChat, "reply to a conversation"},
    {"POST", "/v1/completions", Action::kCompletions, "continue a text, or score it"},
    {"GET", "/v1/models", Action::kModels, "the model and its adapters"},
    {"GET", "/v1/models/*", Action::kModels, "one of them"},
    {"POST", "/chat/completions", Action::kChat, "the same as under /v1"},
    {"POST", "/completions", Action::kCompletions, "the same as under /v1, with Megatron-LM's ids"},
    {"PUT", "/api", Action::kApi, "Megatron-LM's text generation"},
    {"POST", "/tokenize", Action::kTokenize, "token ids of a text or a conversation"},
    {"POST", "/detokenize", Action::kDetokenize, "the text of token ids"},
    {"GET", "/tokenizer_info", Action::kTokenizerInfo, "special tokens and the chat template"},
    {"GET", "/health", Action::kHealth, "200: takes requests; 503: not now"},
    {"GET", "/v1/health", Action::kHealth, "the same"},
    {"GET", "/health/ready", Action::kHealth, "the same"},
    {"GET", "/health/live", Action::kAlive, "200 while the engine has not failed"},
    {"GET", "/metrics", Action::kMetrics, "metrics for Prometheus"},
    {"GET", "/version", Action::kVersion, "of this program"},
    {"POST", "/start_profile", Action::kProfile, "refused"},
    {"POST", "/stop_profile", Action::kProfile, "refused"},
    {"POST", "/v1/start_profile", Action::kProfile, "refused"},
    {"POST", "/v1/stop_profile", Action::kProfile, "refused"},
    {"GET", "/admin/status", Action::kStatus, "state and counters of the engine",
     RouteAccess::kAdmin},
    {"POST", "/admin/pause", Action::kCommand, "stop between two steps", RouteAccess::kAdmin},
    {"POST", "/admin/resume", Action::kCommand, "go on", RouteAccess::kAdmin},
    {"POST", "/admin/suspend", Action::kCommand, "free the memory of cache and weights",
     RouteAccess::kAdmin},
    {"POST", "/admin/update_weights", Action::kCommand, "load other weights", RouteAccess::kAdmin},
    {"POST", "/admin/drain", Action::kCommand, "finish what has begun, then stop",
     RouteAccess::kAdmin},
};

bool matches(const Route& route, std::string_view path) {
  return route.path.ends_with("/*")
             ? path.size() >= route.path.size() &&
                   path.starts_with(route.path.substr(0, route.path.size() - 1))
             : path == route.path;
}

// The route of a request; null: none. `allowed`: methods of its path.
const Route* find_route(const HttpRequest& request, std::string& allowed) {
  for (const Route& route : kRoutes) {
    if (!matches(route, request.path)) continue;
    if (route.method == request.method || (route.method == "GET" && request.method == "HEAD"))
      return &route;
    allowed +=
        cat(allowed.empty() ? "" : ", ", route.method, route.method == "GET" ? ", HEAD" : "");
  }
  return nullptr;
}

ErrorShape shape_of(std::string_view path) {
  return path == "/api" ? ErrorShape::kMegatron : ErrorShape::kOpenAi;
}

void add_plain_headers(HttpResponse& response) {
  response.headers.push_back({"Cache-Control", "no-store"});
  response.headers.push_back({"X-Content-Type-Options", "nosniff"});
}

// Least time that the client and the server allow, less what has passed.
int64_t timeout_of(const HttpRequest& request, double limit_seconds, int64_t passed_ns) {
  int64_t timeout = std::llround(limit_seconds * 1e9);
  const std::string_view given = request.header("X-Request-Timeout-Ms");
  if (!given.empty()) {
    int64_t ms = 0;
    const auto read = std::from_chars(given.data(), given.data() + given.size(), ms);
    if (read.ec != std::errc() || read.ptr != given.data() + given.size() || ms <= 0)
      throw ApiError(400, "X-Request-Timeout-Ms",
                     "the header X-Request-Timeout-Ms is no positive number of milliseconds");
    if (ms < timeout / 1'000'000) timeout = ms * 1'000'000;
  }
  return std::max<int64_t>(1, timeout - passed_ns);
}

// Of a client on this machine.
bool is_loopback_address(std::string_view address) {
  if (address.starts_with("::ffff:")) address.remove_prefix(7);
  return address.starts_with("127.") || address == "::1";
}

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a request gets whose reading ended with an exception. Only an ApiError is meant for clients.
ApiError error_for_client(const std::exception& error) {
  if (const auto* const known = dynamic_cast<const ApiError*>(&error)) return *known;
  log_error(cat("reading a request failed: ", error.what()));
  return ApiError(500, "", "the server failed to read the request; its log says why");
}

// The keys that clients need. Throws UsageError if other machines could come in without.
ApiKeys keys_of(const ServeConfig& config) {
  if (!config.api_key_file.empty()) return ApiKeys(config.api_key_file);
  if (!is_loopback_host(config.host) && !config.no_auth)
    throw UsageError(cat("--host ", config.host,
                         " lets other machines in, and nobody needs a key\nhint: --api-key-file "
                         "FILE, or --no-auth if everybody there may use the model"));
  return {};
}

}  // namespace

// A request with its route.
struct ApiServer::Call {
  std::shared_ptr<HttpExchange> exchange;
  const Route* route = nullptr;
  int64_t arrived_ns = 0;
  const HttpRequest& request() const { return exchange->request(); }
};

std::vector<RouteInfo> all_routes() {
  std::vector<RouteInfo> routes;
  for (const Route& route : kRoutes)
    routes.push_back({route.method, route.path, route.access, route.summary});
  return routes;
}

void ApiServer::check(const ServeConfig& config, const ServeLimits& limits) {
  struct NoHandler final : HttpHandler {
    std::optional<HttpResponse> refuse(const HttpRequest&) override { return std::nullopt; }
    void handle(std::shared_ptr<HttpExchange>) override {}
    HttpResponse fault_response(int, std::string_view) override { return {}; }
  } handler;
  keys_of(config);
  const HttpServer listens(http_options(config, limits), handler);
}

ApiServer::ApiServer(const ServeConfig& config, const ServeLimits& limits, EngineService& engine,
                     const ServedModel& model)
    : config_(config), limits_(limits), engine_(engine), model_(model), keys_(keys_of(config)) {
  const bool loopback = is_loopback_host(config.host);
  host_rules_ = {.loopback_only = loopback, .any = !keys_.empty(), .names = config.allowed_hosts};
  http_ =
      std::make_unique<HttpServer>(http_options(config, limits), static_cast<HttpHandler&>(*this));
  router_ = std::make_unique<EventRouter>(engine_, *http_);
  workers_ = std::make_unique<WorkerPool>(static_cast<int>(config.request_threads),
                                          static_cast<size_t>(limits.max_pending_requests));
  engine_.set_listener([this](std::vector<Event> events) { router_->deliver(std::move(events)); });
}

ApiServer::~ApiServer() { stop(); }

void ApiServer::start() { http_->start(); }
int ApiServer::port() const { return http_->port(); }
HttpCounts ApiServer::counts() const { return http_->counts(); }
size_t ApiServer::num_open() const { return router_->num_open(); }

std::string ApiServer::url() const {
  const bool six = config_.host.find(':') != std::string::npos;
  return cat(config_.ssl_certfile.empty() ? "http://" : "https://", six ? "[" : "", config_.host,
             six ? "]" : "", ":", port());
}

size_t ApiServer::drain(int64_t timeout_ns) {
  const int64_t end = steady_now_ns() + timeout_ns;
  draining_ = true;
  http_->drain();
  while (http_->counts().responding > 0 && steady_now_ns() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return static_cast<size_t>(http_->counts().responding);
}

void ApiServer::stop() {
  workers_->stop();
  http_->stop();
}

HttpResponse ApiServer::fault_response(int status, std::string_view message) {
  responses_.count("", status);
  return error_response(ApiError(status, "", std::string(message)), ErrorShape::kOpenAi);
}

// Everything that does not need the body, before it is read. Keys come first: without one nobody
// learns which routes there are.
std::optional<ApiError> ApiServer::check_access(const HttpRequest& head) const {
  if (auto error = check_host(head, host_rules_)) return error;
  std::optional<ApiKeys::Client> client;
  if (!keys_.empty()) {
    client = keys_.find(key_of(head));
    if (!client)
      return ApiError(401, "", "no valid API key: send the header \"Authorization: Bearer KEY\"",
                      "invalid_api_key");
  }
  std::string allowed;
  const Route* const route = find_route(head, allowed);
  if (route == nullptr && allowed.empty())
    return ApiError(404, "", cat("there is no route ", head.path.substr(0, 200)), "not_found");
  if (route == nullptr)
    return ApiError(405, "", cat(head.path, " takes ", allowed), "method_not_allowed");
  if (route->access == RouteAccess::kAdmin &&
      !(client ? client->admin : is_loopback_address(head.peer)))
    return ApiError(403, "", "/admin needs an admin's key", "not_admin");
  return std::nullopt;
}

std::optional<HttpResponse> ApiServer::refuse(const HttpRequest& head) {
  const auto error = check_access(head);
  if (!error) return std::nullopt;
  HttpResponse response = error_response(*error, shape_of(head.path));
  if (error->status == 401) {
    // Browsers ask their users for a key at the page alone.
    response.headers.push_back({"WWW-Authenticate", "Bearer"});
    if (head.path == "/")
      response.headers.push_back(
          {"WWW-Authenticate", "Basic realm=\"megatron\", charset=\"UTF-8\""});
  }
  if (error->status == 405) {
    std::string allowed;
    find_route(head, allowed);
    response.headers.push_back({"Allow", allowed});
  }
  add_plain_headers(response);
  responses_.count("", error->status);
  return response;
}

void ApiServer::respond(const Call& call, HttpResponse response) {
  add_plain_headers(response);
  responses_.count(std::string(call.route->path), response.status);
  call.exchange->respond(std::move(response));
}

void ApiServer::answer_later(Call call, std::function<HttpResponse()> answer) {
  const bool taken = workers_->add([this, call, answer = std::move(answer)] {
    HttpResponse response;
    try {
      response = answer();
    } catch (const std::exception& error) {
      response = error_response(error_for_client(error), shape_of(call.request().path));
    }
    call.exchange->post([this, call, response = std::move(response)]() mutable {
      respond(call, std::move(response));
    });
  });
  if (taken) return;
  ApiError error(429, "", "too many requests wait to be read", "queue_full");
  error.retry_after_s = 1;
  respond(call, error_response(error, shape_of(call.request().path)));
}

void ApiServer::handle(std::shared_ptr<HttpExchange> exchange) {
  std::string allowed;
  const HttpRequest& request = exchange->request();
  Call call{exchange, find_route(request, allowed), steady_now_ns()};
  switch (call.route->action) {
    case Action::kCompletions:
      return generate(std::move(call), Endpoint::kCompletions);
    case Action::kChat:
      return generate(std::move(call), Endpoint::kChat);
    case Action::kApi:
      return generate(std::move(call), Endpoint::kApi);
    case Action::kCommand:
      return command(std::move(call));
    case Action::kTokenize:
      return answer_later(call, [this, call] { return tokenize(call); });
    case Action::kDetokenize:
      return answer_later(call, [this, call] { return detokenize(call); });
    default:
      break;
  }
  try {
    respond(call, simple_answer(call));
  } catch (const ApiError& error) {
    respond(call, error_response(error, shape_of(request.path)));
  }
}

HttpResponse ApiServer::simple_answer(const Call& call) const {
  switch (call.route->action) {
    case Action::kPage:
      return page();
    case Action::kHealth:
      return health(call.request().query != "live");
    case Action::kAlive:
      return health(false);
    case Action::kModels:
      return models(call);
    case Action::kMetrics:
      return metrics();
    case Action::kTokenizerInfo:
      return {.body = tokenizer_info_json(model_)};
    case Action::kStatus:
      return {.body = status_json(engine_.stats(), router_->num_open(), http_->counts())};
    case Action::kVersion: {
      JsonWriter json;
      json.begin_object().member("version", MEGATRON_VERSION).member("commit", build_commit());
      return {.body = json.end_object().text()};
    }
    default:
      throw ApiError(501, "", "profiles are not taken over HTTP", "unsupported");
  }
}

HttpResponse ApiServer::page() const {
  if (!config_.chat_page) throw ApiError(404, "", "the chat page is switched off", "not_found");
  HttpResponse response{.content_type = "text/html; charset=utf-8",
                        .body = std::string(chat_page())};
  response.headers = {{"Content-Security-Policy", std::string(chat_page_policy())},
                      {"Referrer-Policy", "no-referrer"},
                      {"X-Frame-Options", "DENY"},
                      {"Cross-Origin-Opener-Policy", "same-origin"},
                      {"Cross-Origin-Resource-Policy", "same-origin"}};
  return response;
}

HttpResponse ApiServer::health(bool ready) const {
  const EngineStats stats = engine_.stats();
  const bool takes =
      !draining_ && (stats.state == EngineState::kRunning || stats.state == EngineState::kPaused);
  const bool good = ready ? takes : stats.state != EngineState::kFailed;
  JsonWriter json;
  json.begin_object()
      .member("status", good ? "ok" : "unavailable")
      .member("service", "megatron")
      .member("ready", takes)
      .member("state", draining_ ? "draining" : name(stats.state));
  if (!stats.failure.empty()) json.member("failure", stats.failure);
  HttpResponse response{.status = good ? 200 : 503, .body = json.end_object().text()};
  if (!good) response.headers.push_back({"Retry-After", "1"});
  return response;
}

HttpResponse ApiServer::models(const Call& call) const {
  constexpr std::string_view kPrefix = "/v1/models/";
  const std::string& path = call.request().path;
  const std::string wanted = path.starts_with(kPrefix) ? path.substr(kPrefix.size()) : "";
  JsonWriter json;
  const auto write = [&](const std::string& name, bool adapter) {
    json.begin_object()
        .member("id", name)
        .member("object", "model")
        .member("created", model_.created)
        .member("owned_by", "megatron")
        .member("max_model_len", model_.limits.max_positions)
        .key("parent");
    adapter ? json.value(model_.name) : json.null();
    json.end_object();
  };
  if (!wanted.empty()) {
    const bool adapter =
        std::find(model_.adapters.begin(), model_.adapters.end(), wanted) != model_.adapters.end();
    if (wanted != model_.name && !adapter)
      throw ApiError(404, "model", cat("there is no model \"", wanted.substr(0, 200), "\" here"),
                     "model_not_found");
    write(wanted, adapter);
    return {.body = json.text()};
  }
  json.begin_object().member("object", "list").key("data").begin_array();
  write(model_.name, false);
  for (const std::string& adapter : model_.adapters) write(adapter, true);
  json.end_array().end_object();
  return {.body = json.text()};
}

HttpResponse ApiServer::metrics() const {
  const EngineStats stats = engine_.stats();
  const HttpCounts counts = http_->counts();
  return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
          .body = metrics_text({.engine = stats,
                                .http = counts,
                                .responses = responses_,
                                .model = model_.name,
                                .version = MEGATRON_VERSION,
                                .commit = build_commit(),
                                .pending = workers_->num_waiting()})};
}

HttpResponse ApiServer::tokenize(const Call& call) const {
  return {.body = tokenize_json(call.request().body, model_, limits_)};
}

HttpResponse ApiServer::detokenize(const Call& call) const {
  return {.body = detokenize_json(call.request().body, model_, limits_)};
}

void ApiServer::generate(Call call, Endpoint endpoint) {
  if (draining_) {
    ApiError error(503, "", "the server is about to stop", "draining");
    error.retry_after_s = 1;
    return respond(call, error_response(error, shape_of(call.request().path)));
  }
  const bool taken = workers_->add([this, call, endpoint] {
    try {
      const std::string& body = call.request().body;
      GenerationRequest request = endpoint == Endpoint::kChat ? parse_chat(body, model_, limits_)
                                  : endpoint == Endpoint::kApi
                                      ? parse_api(body, model_, limits_)
                                      : parse_completion(body, model_, limits_);
      request.megatron_extras = !call.request().path.starts_with("/v1/");
      prepare(request, model_, config_.default_max_tokens);
      if (config_.log_prompts)
        for (const PromptInput& prompt : request.prompts)
          log_info(cat("prompt of ", call.request().peer, ": ",
                       prompt.is_text ? prompt.text : text_of(*model_.tokenizer, prompt.ids)));
      request.spec.timeout_ns = timeout_of(call.request(), limits_.request_timeout_seconds,
                                           steady_now_ns() - call.arrived_ns);
      auto generation =
          std::make_shared<RunningGeneration>(*router_, responses_, model_, std::move(request),
                                              call.exchange, std::string(call.route->path));
      call.exchange->post([generation] { generation->start(); });
    } catch (const std::exception& error) {
      call.exchange->post(
          [this, call,
           response = error_response(error_for_client(error), shape_of(call.request().path))] {
            respond(call, response);
          });
    }
  });
  if (taken) return;
  ApiError error(429, "", "too many requests wait to be read", "queue_full");
  error.retry_after_s = 1;
  respond(call, error_response(error, shape_of(call.request().path)));
}

void ApiServer::command(Call call) {
  EngineCommandRequest wanted;
  try {
    constexpr std::string_view kPrefix = "/admin/";
    wanted = parse_engine_command(call.route->path.substr(kPrefix.size()), call.request().body);
  } catch (const ApiError& error) {
    return respond(call, error_response(error, ErrorShape::kOpenAi));
  }
  engine_.command(wanted.command, wanted.timeout_ns)
      .then([this, call](const CommandOutcome& outcome) {
        call.exchange->post([this, call, outcome] { respond(call, command_response(outcome)); });
      });
}

}  // namespace megatron
