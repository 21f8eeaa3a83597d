#include "tools/support/served_job.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/inference/rank_sockets.h"
#include "megatron/reporting/build_commit.h"
#include "megatron/runtime/device.h"

namespace megatron {
namespace {

// Rank 0 speaks once a second, but not while it computes a step.
constexpr int64_t kLeastSilenceNs = 30'000'000'000;

// Rank 0 says where it listens.
std::unique_ptr<RankSockets> listen_for_ranks(const Job& job) {
  if (job.launch.world_size == 1) return nullptr;
  auto sockets = std::make_unique<RankSockets>(
      job.launch.one_node() ? "127.0.0.1" : job.launch.master_addr, job.launch.world_size);
  job.agreement->broadcast(sockets->address());
  return sockets;
}

void follow_first_rank(const EngineConfig& engine, const Job& job, ServedRank& rank) {
  RankSocket socket(job.agreement->broadcast(""), job.launch.rank);
  job.after_first_step();
  const MonotonicClock clock;
  const auto step_ns = static_cast<int64_t>(engine.step_timeout_seconds * 1e9);
  follow(socket, rank.runner(), clock,
         {.silence_ns = std::max(step_ns, kLeastSilenceNs), .build = build_commit()});
}

}  // namespace

RuntimeOptions served_job_options(const ServedJobFlags& flags, const Launch& launch,
                                  std::string_view command) {
  const int64_t ranks = flags.ranks.ranks();
  MEGATRON_CHECK(
      launch.world_size == ranks, "--tensor-model-parallel-size ",
      flags.ranks.tensor_model_parallel_size, " and --pipeline-model-parallel-size ",
      flags.ranks.pipeline_model_parallel_size, " are ", ranks, ranks == 1 ? " rank" : " ranks",
      ", and ", launch.world_size == 1 ? "one was" : cat(launch.world_size, " were"), " started",
      ranks > 1 ? cat("\nhint: torchrun --no-python --nproc-per-node ", ranks, " ", command, " ...")
                : "\nhint: several replicas are jobs of their own, servers each with a --port");
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

std::shared_ptr<ModelService> join_served_job(const ServedJobFlags& flags, const Job& job,
                                              const ServeConfig& serve, const ServeLimits& limits) {
  auto rank = load_served_rank(flags.load, flags.engine, job.groups, job.local_rank,
                               job.local_world_size, job.agreement);
  if (!job.is_first()) {
    follow_first_rank(flags.engine, job, *rank);
    return nullptr;
  }
  std::shared_ptr<ModelService> service = make_model_service(
      std::move(rank), listen_for_ranks(job), flags.load, flags.engine, serve, limits);
  // The monitor of the ranks keeps it until the job ends.
  if (job.when_failed)
    job.when_failed([service](const JobFailure& failure) { service->fail(failure.text); });
  return service;
}

}  // namespace megatron
