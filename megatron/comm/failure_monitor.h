// If one rank fails, every rank exits: a thread in each process watches the peers, reports a
// failure once, and ends the process if the failure leaves it blocked.
//
// Goals: if a rank throws, dies, is stopped, loops forever or issues another collective than its
// peers, the whole job exits with a nonzero code within the timeout plus a few seconds, and one
// report on standard error names that rank. Non-goals: continuing without the rank; restarting from
// the last checkpoint is the launcher's task (torchrun --max-restarts).
//
// The timeout is --distributed-timeout-minutes.
//
// How: each rank writes a heartbeat to the store once a second and checks its own calls in flight.
// The first rank to see a problem (its own error, a call older than the timeout while no rank
// reports checkpoint progress, a dead process on its machine, no heartbeat from a rank for the
// timeout) becomes the reporter: it asks all ranks for their state, explains the failure
// (detail/failure_report.h), prints it and publishes the verdict, upon which the others exit
// silently. Ranks that do not answer are killed by their neighbours on the same machine. Rank 0
// watches all heartbeats, and all ranks watch rank 0's.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "megatron/base/failure_class.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/rendezvous.h"

namespace megatron {

// Why a job has failed, as all its ranks are told.
struct JobFailure {
  int culprit = 0;  // the rank that failed first
  FailureClass failure = FailureClass::kRetry;
  std::string text;  // the report: "[rank 2, dp 2] the disk is full\nhint: ..."
};

// Must live as long as the rank uses its groups; one per process. Does nothing for one rank.
// Installs a SIGTERM handler (unless there is one), so that a launcher which terminates all
// processes when one died does not prevent the report, and a std::terminate handler for uncaught
// errors of threads.
class FailureMonitor {
 public:
  // `place`: where this rank is in the mesh, for messages: "tp 1 pp 2 dp 0".
  FailureMonitor(const Launch& launch, const Connection& connection, std::string place,
                 double timeout_seconds);
  // Normal exit of this rank; its peers no longer expect heartbeats.
  ~FailureMonitor();
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  void set_timeout(double seconds);

  // Called once, from the monitor's thread, when the job has failed and before this process exits:
  // on rank 0, or on the reporting rank if rank 0 is lost (on one rank per machine if the store is
  // lost with it).
  void when_failed(std::function<void(const JobFailure&)> callback);

  // Reports that this rank is reading or writing a checkpoint: ranks blocked in a collective,
  // directly or indirectly because of it, keep waiting. Cheap; any thread; published once a second.
  // A rank that hangs is found `timeout` after the last progress of any rank.
  void progress();

  // Reports that this rank has failed with `error`. Returns whether some rank has reported the
  // failure; if not (one rank), the caller prints it. The caller then exits by std::_Exit, because
  // threads may be blocked in collectives; if it does not within a second, the monitor does.
  bool fail(const std::exception& error);
  // The exit code of the reported failure, the same on every rank that was told.
  int failure_exit_code() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
