#include "megatron/comm/rendezvous.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/comm/c10d_backend.h"
#include "megatron/comm/detail/start_deadline.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kLibraryTimeoutSeconds = 24 * 3600;
constexpr int64_t kSocketsPerRank = 3;  // of the store: see docs/parallelism.md
constexpr std::string_view kBackends[] = {"auto", "nccl", "gloo"};

constexpr double kRefusalSeconds = 3;  // how long a rank that cannot start tries to tell the others

// The host at which all ranks look for the store.
std::string store_host(const Launch& launch) {
  return launch.one_node() && !launch.store_is_hosted ? "127.0.0.1" : launch.master_addr;
}

// Keys are prefixed with this start of this job: an agent's store outlives restarted ranks.
std::shared_ptr<Store> open_store(const Launch& launch, double timeout_seconds) {
  StoreAddress address;
  address.host = store_host(launch);
  address.port = launch.master_port;
  address.host_here = launch.rank == 0 && !launch.store_is_hosted;
  address.bind_address = launch.one_node() ? "127.0.0.1" : "";
  address.prefix = cat("megatron/", launch.run_id, "/", launch.restart_count);
  address.timeout_seconds = timeout_seconds;
  return make_tcp_store(address);
}

double start_seconds(const CommConfig& config) {
  const char* given = std::getenv("MEGATRON_TEST_START_SECONDS");
  return given != nullptr ? std::atof(given) : config.timeout_seconds();
}

// c10d logs every failed attempt to connect, with stack frames. All its messages are silenced
// during the start, whose errors we report; afterwards its warnings of broken connections are,
// since the errors that follow say the same.
class QuietLibrary {
 public:
  QuietLibrary() {
    if (!spoken_for_) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  }
  ~QuietLibrary() {
    if (!spoken_for_) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  }

 private:
  const bool spoken_for_ = std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr;
};

DistributedBackend choose_backend(DistributedBackend kind, bool on_gpu) {
  if (kind == DistributedBackend::kAuto)
    kind = on_gpu ? DistributedBackend::kNccl : DistributedBackend::kGloo;
  if (kind == DistributedBackend::kNccl && !on_gpu)
    throw UsageError(
        "--distributed-backend nccl needs GPUs, but this run is on CPUs\nhint: "
        "--distributed-backend gloo");
  if (kind == DistributedBackend::kGloo && on_gpu)
    throw UsageError(
        "--distributed-backend gloo is for runs on CPUs, but this run is on GPUs\nhint: "
        "--distributed-backend nccl");
  return kind;
}

// Rank 0's store needs several sockets for each rank, Gloo one for each pair.
void provide_open_files(const Launch& launch) {
  const int64_t limit = raise_open_files_limit();
  const int64_t needed = kSocketsPerRank * launch.world_size + 256;
  if (launch.rank == 0 && !launch.store_is_hosted && limit < needed)
    log_warning(cat("rank 0 may open ", limit, " files, and its store needs about ", needed,
                    " for ", launch.world_size, " ranks: raise the hard limit (ulimit -Hn)"));
}

}  // namespace

void CommConfig::fields(FieldVisitor& visitor) {
  visitor.role(FieldRole::kMachine);
  visitor.group("communication");
  visitor.choice("distributed_backend", distributed_backend, kBackends,
                 "library between the ranks; auto: NCCL between GPUs, Gloo between CPUs");
  visitor.field("distributed_timeout_minutes", distributed_timeout_minutes,
                "how long a rank waits for others before the job is given up");
  visitor.field("distributed_timeout_seconds_after_init", distributed_timeout_seconds_after_init,
                "the same, from the end of the first step on");
  visitor.field(
      "distributed_interface", distributed_interface,
      "network interface between machines, such as eth0; chosen by the library when not given");
}

void CommConfig::validate(Violations& violations) const {
  if (distributed_timeout_minutes < 1)
    violations.add(cat("--distributed-timeout-minutes is ", distributed_timeout_minutes),
                   "a positive number");
  if (distributed_timeout_seconds_after_init && *distributed_timeout_seconds_after_init < 1)
    violations.add(cat("--distributed-timeout-seconds-after-init is ",
                       *distributed_timeout_seconds_after_init),
                   "a positive number");
}

Connection connect(const Launch& launch, const CommConfig& config, const at::Device& device,
                   const RankSettings& settings) {
  Connection connection;
  if (launch.world_size == 1) return connection;
  // Writing to a dead peer should give an error to report, not a signal that ends this rank first;
  // Gloo does not suppress SIGPIPE.
  std::signal(SIGPIPE, SIG_IGN);
  const DistributedBackend kind = choose_backend(config.distributed_backend, device.is_cuda());
  if (!config.distributed_interface.empty())
    setenv("NCCL_SOCKET_IFNAME", cat("=", config.distributed_interface).c_str(), 0);

  const double timeout = start_seconds(config);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  StartDeadline watch(cat("rank ", launch.rank), timeout);
  const QuietLibrary quiet;
  provide_open_files(launch);
  const std::string where = cat(store_host(launch), ":", launch.master_port);
  watch.enter(cat("connecting to the store at ", where));
  connection.store = open_store(launch, timeout);
  watch.enter(cat("waiting for the store at ", where, " to answer"));
  const double left =
      std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
  connection.neighbours = meet(launch, *connection.store, settings, std::max(left, 0.1));

  watch.enter("making the group of all ranks");
  C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  // The failure monitor measures how long a call waits, and knows when a long wait is legitimate;
  // c10d's own limit must not come first.
  options.timeout_seconds = std::max(
      {config.timeout_seconds(), config.timeout_seconds_after_init(), kLibraryTimeoutSeconds});
  options.interface = config.distributed_interface;
  options.loopback = launch.one_node();
  const std::shared_ptr<Backend> world = kind == DistributedBackend::kNccl
                                             ? make_nccl_backend(connection.store, options)
                                             : make_gloo_backend(connection.store, options);
  connection.history = std::make_shared<CollectiveHistory>();
  connection.world = record_calls(world, connection.history);
  return connection;
}

bool refuse_to_start(const Launch& launch, int exit_code) {
  if (launch.world_size == 1) return true;
  try {
    const StartDeadline watch(cat("rank ", launch.rank), 3 * kRefusalSeconds);
    const QuietLibrary quiet;
    const std::shared_ptr<Store> store = open_store(launch, kRefusalSeconds);
    const bool first = call_off(*store, exit_code);
    if (launch.rank == 0 && !launch.store_is_hosted)
      wait_until_all_left(*store, launch.world_size, kRefusalSeconds);
    return first;
  } catch (const Error&) {
    return true;  // there is no other rank to tell
  }
}

}  // namespace megatron
