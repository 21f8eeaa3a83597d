// megatron serve: a model behind the OpenAI API, Megatron-LM's text generation and a chat page.
#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/runtime/job.h"
#include "megatron/runtime/shared_settings.h"
#include "megatron/runtime/signals.h"
#include "megatron/serving/api_server.h"
#include "tools/support/served_job.h"

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

struct ServeFlags : ServedJobFlags {
  ServeConfig config;
  ServeLimits limits;
};

int serve_model(const ServeFlags& flags, const Job& job, const SignalHandler& signals) {
  if (job.is_first()) ApiServer::check(flags.config, flags.limits);
  const std::shared_ptr<ModelService> service =
      join_served_job(flags, job, flags.config, flags.limits);
  if (!service) return 0;
  ApiServer server(flags.config, flags.limits, service->engine(), service->model());
  service->start();
  if (job.after_first_step) job.after_first_step();
  server.start();
  print_line(cat(service->model().name, " is served at ", server.url()));
  check_standard_output();
  const std::string failure = serve_until_end(service->engine(), signals);
  drain(server, service->engine(),
        failure.empty() ? std::llround(flags.config.drain_timeout_seconds * 1e9) : kFailureDrainNs);
  server.stop();
  service->stop();
  MEGATRON_CHECK(failure.empty(), "the engine has failed: ", failure);
  return 0;
}

}  // namespace

extern "C" int megatron_serve(int argc, char** argv) {
  ServeFlags flags;
  Config* const configs[] = {&flags.load,   &flags.config, &flags.engine,
                             &flags.limits, &flags.ranks,  &flags.comm};
  const char* const usage = "megatron serve DIR [flags]";
  const Launch launch = launch_from_environment();
  if (!parse_or_help(usage, configs, argc, argv,
                     {.known = known_inference_flags(/*ranks=*/true), .positional = "load"}))
    return 0;
  flags.engine.max_media = flags.limits.max_media;
  RuntimeOptions options = served_job_options(flags, launch, "megatron serve");
  options.settings = [&] { return shared_settings(configs); };
  // Of several ranks the first alone acts on a signal, and tells the others to leave.
  const SignalHandler signals(SIGTERM, launch.rank == 0 ? kServeSignals : SignalTexts{"", ""});
  return run_job(launch, options, [&](const Job& job) { return serve_model(flags, job, signals); });
}

}  // namespace megatron
