// How the processes of a job find and connect to each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/comm/collective_history.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/meeting.h"
#include "megatron/comm/process_group.h"
#include "megatron/comm/store.h"

namespace megatron {

enum class DistributedBackend { kAuto, kNccl, kGloo };

struct CommConfig : Config {
  // By device: NCCL between GPUs, Gloo between CPUs
  DistributedBackend distributed_backend = DistributedBackend::kAuto;
  int64_t distributed_timeout_minutes = 10;
  // The timeout from the end of the first step on; unset: the same as before. For fast detection of
  // hangs, since only the start is slow.
  std::optional<int64_t> distributed_timeout_seconds_after_init;
  // Network interface, such as "eth0"; empty: chosen by the backend
  std::string distributed_interface;

  double timeout_seconds() const { return 60.0 * static_cast<double>(distributed_timeout_minutes); }
  double timeout_seconds_after_init() const {
    return distributed_timeout_seconds_after_init
               ? static_cast<double>(*distributed_timeout_seconds_after_init)
               : timeout_seconds();
  }

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// A rank's connections to its job. Everything is null or empty for one rank.
struct Connection {
  std::shared_ptr<Backend> world;  // writes every call into `history`
  // Of this start of this job alone. Nobody waits on it after the meeting, but on its views.
  std::shared_ptr<Store> store;
  std::shared_ptr<CollectiveHistory> history;
  std::vector<Neighbour> neighbours;  // other ranks on this machine
};

// Connects to the other ranks: over the store of torchrun's agent, or one that rank 0 hosts at
// MASTER_ADDR:MASTER_PORT. If all ranks are on one machine, sockets listen on the loopback address
// only. Returns once every rank has arrived with the same settings; throws like meet()
// (comm/meeting.h). The whole start ends within --distributed-timeout-minutes and a second, if
// necessary by ending the process; MEGATRON_TEST_START_SECONDS overrides the limit in tests.
Connection connect(const Launch& launch, const CommConfig& config, const at::Device& device,
                   const RankSettings& settings = {});

// For a rank whose own flags are wrong: releases the others, whose flags may be right, from
// waiting. Returns whether this rank is the one to print its error; the others exit with
// `exit_code`.
bool refuse_to_start(const Launch& launch, int exit_code);

}  // namespace megatron
