// One rank fails, every rank leaves: a thread of each process that watches the peers, explains a
// failure once, and ends the process when the failure leaves it waiting for nothing.
//
// Goals: a rank that throws, dies, stops, loops for ever or makes another call than its peers ends
// the whole job with a nonzero exit code within the timeout and a few seconds, and one report on
// standard error names it. Non-goals: going on without the rank; that is the launcher's part
// (torchrun --max-restarts) with the last checkpoint.
//
// How: each rank writes a sign of life to the store once a second and looks at its own calls under
// way. Whoever sees something wrong first (its own error, a call older than the timeout while no
// rank works on a checkpoint, a process of this machine that is gone, a rank that is silent for the
// timeout) is the one to report: it asks all ranks for their state, explains the failure
// (detail/failure_report.h), prints it and publishes the verdict, at which the others leave
// quietly. Ranks that do not answer are killed by their neighbours on the same machine. Rank 0
// watches everyone's signs of life, and everyone watches rank 0's.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "megatron/base/failure_class.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/rendezvous.h"

namespace megatron {

// Why a job has failed, as every rank of it learns.
struct JobFailure {
  int culprit = 0;  // the rank that failed first
  FailureClass failure = FailureClass::kRetry;
  std::string text;  // the report: "[rank 2, dp 2] the disk is full\nhint: ..."
};

// Lives as long as the rank uses its groups; one per process. Does nothing for one rank. Takes over
// SIGTERM (unless it has a handler already), so that a launcher which ends all processes when one
// died does not end the report too, and std::terminate, for errors of threads that nobody catches.
class FailureMonitor {
 public:
  // `place`: where this rank is in the mesh, for messages: "tp 1 pp 2 dp 0".
  FailureMonitor(const Launch& launch, const Connection& connection, std::string place,
                 double timeout_seconds);
  // The rank leaves in good order; its peers no longer expect signs of life.
  ~FailureMonitor();
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  void set_timeout(double seconds);

  // Called once, from the monitor's thread, when the job has failed and before this process ends:
  // on rank 0, and on the rank that reports when rank 0 is lost (on one rank per machine, when the
  // store is lost with it).
  void when_failed(std::function<void(const JobFailure&)> callback);

  // This rank is reading or writing a checkpoint: ranks that wait in a collective, for it or for
  // one that waits for it, go on waiting. Cheap, any thread; told to the others once a second. A
  // rank that hangs is found `timeout` after the last progress of any rank.
  void progress();

  // This rank has failed with `error`. Returns whether the failure has been reported, by this rank
  // or another one; if not (one rank), the caller prints it. The caller then leaves by std::_Exit,
  // because threads may be stuck in collectives; if it does not within a second, the monitor does.
  bool fail(const std::exception& error);
  // The exit code of the failure that was reported, the same on every rank that has learned of it.
  int failure_exit_code() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
