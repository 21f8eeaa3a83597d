// megatron serve: a model behind the OpenAI API, Megatron-LM's text generation and a chat page.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/runtime/signals.h"
#include "megatron/serving/api_server.h"
#include "tools/support/served_model_flags.h"

namespace megatron {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kFailureDrainNs = 2 * kSecond;

// What is shown while the server runs: "3 run, 0 wait, 120.0 tokens/s, cache 12%".
class StatusLine {
 public:
  void show(const EngineStats& stats) {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    if (seconds < 1.0) return;
    const double rate = static_cast<double>(stats.output_tokens - tokens_) / seconds;
    set_status_line(
        cat(stats.running, " run, ", stats.queued, " wait, ", format_fixed(rate, 1), " tokens/s"));
    last_ = now;
    tokens_ = stats.output_tokens;
  }
  ~StatusLine() { set_status_line(""); }

 private:
  std::chrono::steady_clock::time_point last_;
  uint64_t tokens_ = 0;
};

constexpr SignalTexts kServeSignals = {
    "\nsignal received: no new requests, those that have begun end; a second signal stops at "
    "once\n",
    "\nsecond signal: stopping at once\n"};

// Until a signal, the end of the engine or its failure; the failure.
std::string serve_until_end(EngineService& engine, const SignalHandler& signals) {
  StatusLine status;
  while (signals.received() == 0) {
    const EngineStats stats = engine.stats();
    if (stats.state == EngineState::kFailed) return stats.failure;
    if (stats.state == EngineState::kStopped) break;
    status.show(stats);
    std::this_thread::sleep_for(kLook);
  }
  return "";
}

// Lets what has begun end; requests that wait for an engine that is paused could not.
void drain(ApiServer& server, EngineService& engine, int64_t timeout_ns) {
  const EngineState state = engine.stats().state;
  if (state == EngineState::kPaused || state == EngineState::kSuspended)
    engine.command(DrainCommand{}, timeout_ns);
  if (const size_t cut = server.drain(timeout_ns); cut > 0)
    log_warning(cat(cut, " responses were cut off after ", timeout_ns / kSecond,
                    " s\nhint: --drain-timeout-seconds gives them more time"));
}

}  // namespace

extern "C" int megatron_serve(int argc, char** argv) {
  ServedModelConfig load;
  EngineConfig engine;
  ServeConfig config;
  ServeLimits limits;
  Config* const configs[] = {&load, &config, &engine, &limits};
  if (!parse_or_help("megatron serve DIR [flags]", configs, argc, argv,
                     {.known = known_inference_flags(), .positional = "load"}))
    return 0;
  ApiServer::check(config, limits);
  const ParallelGroups groups;
  const auto service = load_served_model(load, engine, config, limits, groups);
  ApiServer server(config, limits, service->engine(), service->model());
  const SignalHandler signals(SIGTERM, kServeSignals);
  service->start();
  server.start();
  print_line(cat(service->model().name, " is served at ", server.url()));
  check_standard_output();
  const std::string failure = serve_until_end(service->engine(), signals);
  drain(server, service->engine(),
        failure.empty() ? std::llround(config.drain_timeout_seconds * 1e9) : kFailureDrainNs);
  server.stop();
  service->stop();
  MEGATRON_CHECK(failure.empty(), "the engine has failed: ", failure);
  return 0;
}

}  // namespace megatron
