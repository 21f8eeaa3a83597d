// How the processes of a job find one another.
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
  // From the end of the first step on; unset: the same as before. For the fast discovery of hangs,
  // since only the start is slow.
  std::optional<int64_t> distributed_timeout_seconds_after_init;
  // Of the network, such as "eth0"; empty: chosen by the backend
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

// What a rank has of its job. Everything is null or empty for one rank.
struct Connection {
  std::shared_ptr<Backend> world;  // writes every call into `history`
  std::shared_ptr<Store> store;    // of this start of this job alone
  std::shared_ptr<CollectiveHistory> history;
  std::vector<Neighbour> neighbours;  // without this rank
};

// Meets the other ranks: over the store of torchrun's agent, or one that rank 0 holds at
// MASTER_ADDR:MASTER_PORT. When all ranks are on one machine, nothing listens on other addresses
// than the loopback. Returns when every rank is there with the same settings; throws as meet() does
// (comm/meeting.h). Everything together ends within --distributed-timeout-minutes and a second, at
// the latest by the end of the process; MEGATRON_TEST_START_SECONDS, for tests, is another limit.
Connection connect(const Launch& launch, const CommConfig& config, const at::Device& device,
                   const RankSettings& settings = {});

// For a rank whose own flags are wrong: the others, whose flags may be right, do not wait for it.
// Returns whether this rank is the one to print its error; the others leave with `exit_code`.
bool refuse_to_start(const Launch& launch, int exit_code);

}  // namespace megatron
