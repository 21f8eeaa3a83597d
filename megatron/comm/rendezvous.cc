#include "megatron/comm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <c10/util/Logging.h>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/c10d_backend.h"
#include "megatron/comm/detail/machine_id.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kLibraryTimeoutSeconds = 24 * 3600;
constexpr std::string_view kBackends[] = {"auto", "nccl", "gloo"};

std::shared_ptr<Store> open_store(const Launch& launch, double timeout_seconds) {
  StoreAddress address;
  address.host = launch.one_node() && !launch.store_is_hosted ? "127.0.0.1" : launch.master_addr;
  address.port = launch.master_port;
  address.host_here = launch.rank == 0 && !launch.store_is_hosted;
  address.bind_address = launch.one_node() ? "127.0.0.1" : "";
  address.timeout_seconds = timeout_seconds;
  return make_tcp_store(address);
}

// Returns the other ranks of this machine when every rank has arrived.
std::vector<Neighbour> meet(const Launch& launch, Store& store, double timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  const std::string machine = "machine/" + machine_id();
  store.set(cat(machine, "/", store.add(machine, 1)), cat(launch.rank, " ", getpid()));
  store.set(cat("here/", launch.rank), "1");
  if (store.add("here", 1) == launch.world_size) store.set("everybody", "1");
  while (!store.find("everybody")) {
    if (std::chrono::steady_clock::now() > deadline) {
      std::string missing;
      for (int rank = 0; rank < launch.world_size; ++rank) {
        if (!store.find(cat("here/", rank))) missing += cat(missing.empty() ? "" : ", ", rank);
      }
      throw_error(cat("after ", timeout_seconds, " s, these of ", launch.world_size, " ranks have not started: ", missing,
                      "\nhint: see their logs; --distributed-timeout-minutes waits longer"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::vector<Neighbour> neighbours;
  const int64_t num_here = store.add(machine, 0);
  for (int64_t i = 1; i <= num_here; ++i) {
    Neighbour neighbour;
    std::istringstream(store.wait(cat(machine, "/", i), timeout_seconds)) >> neighbour.rank >> neighbour.pid;
    if (neighbour.rank != launch.rank) neighbours.push_back(neighbour);
  }
  return neighbours;
}

}  // namespace

void CommConfig::fields(FieldVisitor& visitor) {
  visitor.group("communication");
  visitor.choice("distributed_backend", distributed_backend, kBackends,
                 "library between the ranks; auto: NCCL between GPUs, Gloo between CPUs");
  visitor.field("distributed_timeout_minutes", distributed_timeout_minutes,
                "how long a rank waits for others before the job is given up");
  visitor.field("distributed_timeout_seconds_after_init", distributed_timeout_seconds_after_init,
                "the same, from the end of the first step on");
  visitor.field("distributed_interface", distributed_interface,
                "network interface between machines, such as eth0; chosen by the library when not given");
}

void CommConfig::validate(Violations& violations) const {
  if (distributed_timeout_minutes < 1)
    violations.add(cat("--distributed-timeout-minutes is ", distributed_timeout_minutes), "a positive number");
  if (distributed_timeout_seconds_after_init && *distributed_timeout_seconds_after_init < 1)
    violations.add(cat("--distributed-timeout-seconds-after-init is ", *distributed_timeout_seconds_after_init), "a positive number");
}

Connection connect(const Launch& launch, const CommConfig& config, const at::Device& device) {
  Connection connection;
  if (launch.world_size == 1) return connection;
  // Writing to a peer that is gone is an error to report, not a signal that ends this rank before it can; Gloo writes plainly.
  std::signal(SIGPIPE, SIG_IGN);
  const bool on_gpu = device.is_cuda();
  DistributedBackend kind = config.distributed_backend;
  if (kind == DistributedBackend::kAuto) kind = on_gpu ? DistributedBackend::kNccl : DistributedBackend::kGloo;
  if (kind == DistributedBackend::kNccl && !on_gpu)
    throw UsageError("--distributed-backend nccl needs GPUs, but this run is on CPUs\nhint: --distributed-backend gloo");
  if (kind == DistributedBackend::kGloo && on_gpu)
    throw UsageError("--distributed-backend gloo is for runs on CPUs, but this run is on GPUs\nhint: --distributed-backend nccl");
  if (!config.distributed_interface.empty()) setenv("NCCL_SOCKET_IFNAME", cat("=", config.distributed_interface).c_str(), 0);

  // c10d warns of every broken connection, with stack frames; the errors that follow say the same.
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_ERROR;

  const double timeout = config.timeout_seconds();
  // An agent's store outlives the ranks that it starts again: each start has keys of its own.
  connection.store = open_store(launch, timeout)
                         ->connection(cat("megatron/", launch.run_id, "/", launch.restart_count));
  connection.neighbours = meet(launch, *connection.store, timeout);

  C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  // The failure monitor counts how long a call waits, and knows when a wait is in order; c10d's own limit must not come first.
  options.timeout_seconds = std::max({timeout, config.timeout_seconds_after_init(), kLibraryTimeoutSeconds});
  options.interface = config.distributed_interface;
  options.loopback = launch.one_node();
  const std::shared_ptr<Backend> world = kind == DistributedBackend::kNccl ? make_nccl_backend(connection.store, options)
                                                                           : make_gloo_backend(connection.store, options);
  connection.history = std::make_shared<CollectiveHistory>();
  connection.world = record_calls(world, connection.history);
  return connection;
}

}  // namespace megatron
