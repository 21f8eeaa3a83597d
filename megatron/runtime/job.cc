#include "megatron/runtime/job.h"

#include <cstdlib>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/base/process_signals.h"
#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/runtime/channel_agreement.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

int exit_code_of(const std::exception& error) { return exit_code(failure_class(error)); }

// Device errors may go away after a restart or on another machine, so they are RetryErrors; running
// out of memory is not.
[[noreturn]] void throw_device_error(const c10::Error& error) {
  const std::string message = error.what_without_backtrace();
  const bool device = message.find("CUDA error") != std::string::npos ||
                      message.find("NCCL error") != std::string::npos;
  const bool memory = message.find("out of memory") != std::string::npos;
  if (device && !memory) throw RetryError(message);
  throw;
}

}  // namespace

int with_own_errors(const std::function<int()>& body) {
  try {
    return body();
  } catch (const c10::DistError& error) {
    throw RetryError(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    throw_device_error(error);
  }
}

int run_job(const Launch& launch, const RuntimeOptions& options,
            const std::function<int(const Job&)>& body) {
  Job job;
  job.launch = launch;
  tune_gemms(options.gemm_tuning ? cache_folder().string() : "");
  if (launch.world_size == 1) return with_own_errors([&] { return body(job); });
  set_quiet(launch.rank != 0);
  set_crash_prefix(cat("[rank ", launch.rank, "] "));
  set_log_prefix(launch.rank != 0 ? cat("[rank ", launch.rank, "] ") : "");
  c10::Device device = c10::kCPU;
  try {
    device = choose_device(options.device, launch.local_rank);
  } catch (const std::exception& error) {
    if (refuse_to_start(launch, exit_code_of(error))) throw;
    return exit_code_of(error);  // another rank reports it
  }
  Connection connection;
  try {
    connection = connect(launch, options.comm, device, options.settings());
  } catch (const StartRefused& refused) {
    return refused.exit_code();
  }
  job.local_rank = launch.local_rank;
  job.local_world_size = launch.local_world_size > 0 ? launch.local_world_size : 1;
  FailureMonitor monitor(
      launch, connection,
      place_in_mesh(options.parallel, options.encoder, launch.rank, launch.world_size),
      options.comm.timeout_seconds());
  try {
    job.clock = std::make_shared<SectionClock>(device);
    job.groups = make_parallel_groups(options.parallel, options.encoder,
                                      watch_waits(connection.world, job.clock));
    ChannelAgreement agreement(*connection.store, launch, options.comm.timeout_seconds(), monitor);
    job.agreement = &agreement;
    job.when_failed = [&](std::function<void(const JobFailure&)> callback) {
      monitor.when_failed(std::move(callback));
    };
    job.after_first_step = [&] { monitor.set_timeout(options.comm.timeout_seconds_after_init()); };
    return with_own_errors([&] { return body(job); });
  } catch (const std::exception& error) {
    if (!monitor.fail(error)) throw;
    // Threads may be stuck in collectives that will never end
    std::_Exit(monitor.failure_exit_code());
  }
}

}  // namespace megatron
