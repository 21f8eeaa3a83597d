// megatron serve: a model behind the OpenAI API, Megatron-LM's text generation and a chat page.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/inference/rank_sockets.h"
#include "megatron/reporting/build_commit.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/job.h"
#include "megatron/runtime/shared_settings.h"
#include "megatron/runtime/signals.h"
#include "megatron/serving/api_server.h"
#include "tools/support/served_model_flags.h"
#include "tools/support/served_ranks_config.h"

namespace megatron {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kFailureDrainNs = 2 * kSecond;
// Rank 0 speaks once a second, but not while it computes a step.
constexpr int64_t kLeastSilenceNs = 30 * kSecond;

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

struct ServeFlags {
  ServedModelConfig load;
  EngineConfig engine;
  ServeConfig config;
  ServeLimits limits;
  ServedRanksConfig ranks;
  CommConfig comm;
};

// Rank 0 says where it listens.
std::unique_ptr<RankSockets> listen_for_ranks(const Job& job) {
  if (job.launch.world_size == 1) return nullptr;
  auto sockets = std::make_unique<RankSockets>(
      job.launch.one_node() ? "127.0.0.1" : job.launch.master_addr, job.launch.world_size);
  job.agreement->broadcast(sockets->address());
  return sockets;
}

// A rank that does what rank 0 decides.
int follow_first_rank(const ServeFlags& flags, const Job& job,
                      const std::unique_ptr<ServedRank>& rank) {
  RankSocket socket(job.agreement->broadcast(""), job.launch.rank);
  job.after_first_step();
  const MonotonicClock clock;
  const auto step_ns = static_cast<int64_t>(flags.engine.step_timeout_seconds * 1e9);
  follow(socket, rank->runner(), clock,
         {.silence_ns = std::max(step_ns, kLeastSilenceNs), .build = build_commit()});
  return 0;
}

int serve_model(const ServeFlags& flags, const Job& job, const SignalHandler& signals) {
  if (job.is_first()) ApiServer::check(flags.config, flags.limits);
  auto rank = load_served_rank(flags.load, flags.engine, job.groups, job.local_rank,
                               job.local_world_size, job.agreement);
  if (!job.is_first()) return follow_first_rank(flags, job, rank);
  // The monitor of the ranks keeps it until the job ends.
  const std::shared_ptr<ModelService> service = make_model_service(
      std::move(rank), listen_for_ranks(job), flags.load, flags.engine, flags.config, flags.limits);
  ApiServer server(flags.config, flags.limits, service->engine(), service->model());
  if (job.when_failed)
    job.when_failed([service](const JobFailure& failure) { service->fail(failure.text); });
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

// How these flags take part in a job. Throws Error if the launcher has started other ranks.
RuntimeOptions runtime_options(const ServeFlags& flags, const Launch& launch) {
  const int64_t ranks = flags.ranks.ranks();
  MEGATRON_CHECK(
      launch.world_size == ranks, "--tensor-model-parallel-size ",
      flags.ranks.tensor_model_parallel_size, " and --pipeline-model-parallel-size ",
      flags.ranks.pipeline_model_parallel_size, " are ", ranks, ranks == 1 ? " rank" : " ranks",
      ", and ", launch.world_size == 1 ? "one was" : cat(launch.world_size, " were"), " started",
      ranks > 1
          ? cat("\nhint: torchrun --no-python --nproc-per-node ", ranks, " megatron serve ...")
          : "\nhint: several replicas are servers of their own, each with a --port");
  RuntimeOptions options;
  options.gemm_tuning = false;  // steps have any number of rows: each would be tuned while all wait
  options.parallel.tensor_model_parallel_size = flags.ranks.tensor_model_parallel_size;
  options.parallel.pipeline_model_parallel_size = flags.ranks.pipeline_model_parallel_size;
  options.comm = flags.comm;
  if (!options.comm.distributed_timeout_seconds_after_init)
    options.comm.distributed_timeout_seconds_after_init =
        static_cast<int64_t>(std::ceil(flags.engine.step_timeout_seconds));
  if (launch.world_size > 1)
    options.device = choose_device(flags.load.device, launch.local_rank).is_cuda()
                         ? DeviceChoice::kCuda
                         : DeviceChoice::kCpu;
  return options;
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
  RuntimeOptions options = runtime_options(flags, launch);
  options.settings = [&] { return shared_settings(configs); };
  // Of several ranks the first alone acts on a signal, and tells the others to leave.
  const SignalHandler signals(SIGTERM, launch.rank == 0 ? kServeSignals : SignalTexts{"", ""});
  return run_job(launch, options, [&](const Job& job) { return serve_model(flags, job, signals); });
}

}  // namespace megatron
