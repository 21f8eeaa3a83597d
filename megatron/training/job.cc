#include "megatron/training/job.h"

#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/comm/control.h"
#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/device.h"

namespace megatron {

namespace {

// Agreement over a channel between processes.
class ChannelAgreement final : public Agreement {
 public:
  ChannelAgreement(Store& store, const Launch& launch, double timeout_seconds)
      : channel_(store, "agreement", launch.rank, launch.world_size, timeout_seconds) {}
  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  std::vector<std::string> gather(const std::string& text) override {
    return channel_.gather(text);
  }
  std::string broadcast(const std::string& text) override { return channel_.broadcast(text); }

 private:
  ControlChannel channel_;
};

int exit_code_of(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error)) return kExitUsage;
  return dynamic_cast<const Error*>(&error) ? kExitFailure : kExitInternal;
}

}  // namespace

int run_job(const Launch& launch, const Arguments& arguments,
            const std::function<int(const Job&)>& body) {
  Job job;
  tune_gemms(arguments.training.gemm_tuning ? cache_folder().string() : "");
  if (launch.world_size == 1) return body(job);
  set_quiet(launch.rank != 0);
  set_log_prefix(launch.rank != 0 ? cat("[rank ", launch.rank, "] ") : "");
  const c10::Device device = choose_device(arguments.training.device, launch.local_rank);
  const Connection connection = connect(launch, arguments.comm, device);
  job.local_rank = launch.local_rank;
  job.local_world_size = launch.local_world_size > 0 ? launch.local_world_size : 1;
  FailureMonitor monitor(launch, connection,
                         place_in_mesh(arguments.parallel, launch.rank, launch.world_size),
                         arguments.comm.timeout_seconds());
  try {
    job.clock = std::make_shared<SectionClock>(device);
    job.groups = make_parallel_groups(arguments.parallel, watch_waits(connection.world, job.clock),
                                      arguments.transformer.query_groups());
    ChannelAgreement agreement(*connection.store, launch, arguments.comm.timeout_seconds());
    job.agreement = &agreement;
    job.after_first_step = [&] {
      monitor.set_timeout(arguments.comm.timeout_seconds_after_init());
    };
    return body(job);
  } catch (const std::exception& error) {
    if (!monitor.fail(error)) throw;
    std::_Exit(exit_code_of(error));  // threads may be stuck in collectives that will never end
  }
}

}  // namespace megatron
