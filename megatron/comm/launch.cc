#include "megatron/comm/launch.h"

#include <cstdlib>
#include <optional>
#include <sstream>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Reads the variables of one launcher; every problem is a UsageError that names the variable.
class Variables {
 public:
  Variables(const Environment& environment, const char* launcher)
      : environment_(environment), launcher_(launcher) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = environment_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }
  bool has(const char* name) const { return text(name).has_value(); }
  std::optional<int> number(const char* name) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    char* end = nullptr;
    const long parsed = std::strtol(value->c_str(), &end, 10);
    if (*end != '\0' || parsed < 0 || parsed > 1 << 24)
      throw UsageError(cat(name, " is \"", *value, "\", expected a number"));
    return static_cast<int>(parsed);
  }
  int required(const char* name, const char* because) const {
    if (const std::optional<int> value = number(name)) return *value;
    throw UsageError(cat(name, " is not set, but ", because, " is\nhint: ", launcher_,
                         " sets both; unset the other one to run one rank"));
  }

 private:
  const Environment& environment_;
  const char* launcher_;
};

// The entry of a machine in a list such as "4(x2),3".
int tasks_on_node(const std::string& list, int node) {
  std::istringstream in(list);
  int first = 0;
  for (std::string item; std::getline(in, item, ',');) {
    const size_t times_at = item.find("(x");
    const int times = times_at == std::string::npos ? 1 : std::atoi(item.c_str() + times_at + 2);
    if (node < first + times) return std::atoi(item.c_str());
    first += times;
  }
  throw UsageError(
      cat("SLURM_STEP_TASKS_PER_NODE is \"", list, "\", which has no entry for node ", node));
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// MASTER_ADDR and MASTER_PORT, which the user may give to any launcher.
void read_master(const Variables& variables, const std::string& default_host, int default_port,
                 Launch& launch) {
  launch.master_addr = variables.text("MASTER_ADDR").value_or(default_host);
  launch.master_port = variables.number("MASTER_PORT").value_or(default_port);
  if (launch.world_size == 1) return;
  if (launch.master_addr.empty())
    throw UsageError(cat(
        "MASTER_ADDR is not set, but ", launch.launcher, " started ", launch.world_size,
        " ranks on several machines\nhint: set MASTER_ADDR to the name of the machine of rank 0"));
  if (launch.master_port < 1 || launch.master_port > 65535)
    throw UsageError(cat("MASTER_PORT is ", launch.master_port, ", expected 1 to 65535"));
}

Launch from_torchrun(const Environment& environment) {
  const Variables variables(environment, "torchrun");
  Launch launch;
  launch.launcher = "torchrun";
  launch.rank = variables.required("RANK", "WORLD_SIZE");
  launch.world_size = variables.required("WORLD_SIZE", "RANK");
  if (launch.world_size > 1) {
    launch.local_rank = variables.required("LOCAL_RANK", "RANK");
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (!variables.has(name))
        throw UsageError(cat(name, " is not set, but WORLD_SIZE is ", launch.world_size,
                             "\nhint: start with torchrun, which sets it"));
    }
  } else {
    launch.local_rank = variables.number("LOCAL_RANK").value_or(0);
  }
  read_master(variables, launch.master_addr, launch.master_port, launch);
  launch.local_world_size = variables.number("LOCAL_WORLD_SIZE")
                                .value_or(is_loopback(launch.master_addr) ? launch.world_size : 0);
  launch.node_rank = variables.number("GROUP_RANK").value_or(0);
  launch.run_id = variables.text("TORCHELASTIC_RUN_ID").value_or("");
  launch.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT").value_or(0);
  launch.store_is_hosted = variables.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  return launch;
}

Launch from_open_mpi(const Environment& environment) {
  const Variables variables(environment, "mpirun");
  Launch launch;
  launch.launcher = "mpirun";
  launch.rank = variables.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  launch.world_size = variables.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
  launch.local_rank = variables.required("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
  launch.local_world_size =
      variables.required("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK");
  launch.run_id = variables.text("PMIX_NAMESPACE").value_or("");
  read_master(variables, launch.one_node() ? launch.master_addr : "", launch.master_port, launch);
  return launch;
}

Launch from_mpich(const Environment& environment) {
  const Variables variables(environment, "mpirun");
  Launch launch;
  launch.launcher = "mpirun";
  launch.rank = variables.required("PMI_RANK", "PMI_SIZE");
  launch.world_size = variables.required("PMI_SIZE", "PMI_RANK");
  if (launch.world_size > 1) {
    launch.local_rank = variables.required("MPI_LOCALRANKID", "PMI_RANK");
    launch.local_world_size = variables.required("MPI_LOCALNRANKS", "PMI_RANK");
  }
  read_master(variables, launch.one_node() ? launch.master_addr : "", launch.master_port, launch);
  return launch;
}

Launch from_slurm(const Environment& environment) {
  const Variables variables(environment, "srun");
  Launch launch;
  launch.launcher = "srun";
  launch.rank = variables.required("SLURM_PROCID", "SLURM_NTASKS");
  const std::optional<int> step_tasks = variables.number("SLURM_STEP_NUM_TASKS");
  launch.world_size = step_tasks ? *step_tasks : variables.required("SLURM_NTASKS", "SLURM_PROCID");
  if (launch.world_size == 1) return launch;
  launch.local_rank = variables.required("SLURM_LOCALID", "SLURM_PROCID");
  launch.node_rank = variables.number("SLURM_NODEID").value_or(0);
  std::optional<std::string> per_node = variables.text("SLURM_STEP_TASKS_PER_NODE");
  if (!per_node) per_node = variables.text("SLURM_TASKS_PER_NODE");
  launch.local_world_size = per_node ? tasks_on_node(*per_node, launch.node_rank)
                                     : variables.number("SLURM_NTASKS_PER_NODE").value_or(0);
  std::optional<std::string> hosts = variables.text("SLURM_STEP_NODELIST");
  if (!hosts) hosts = variables.text("SLURM_NODELIST");
  const int job =
      variables.number("SLURM_JOB_ID").value_or(variables.number("SLURM_JOBID").value_or(0));
  launch.run_id =
      job == 0 ? "" : cat("slurm-", job, "-", variables.text("SLURM_STEP_ID").value_or("0"));
  launch.restart_count = variables.number("SLURM_RESTART_COUNT").value_or(0);
  const std::string host = launch.one_node() ? launch.master_addr : hosts ? first_host(*hosts) : "";
  // A port derived from the job id, since several jobs may share a machine.
  read_master(variables, host, job == 0 ? launch.master_port : 20000 + job % 10000, launch);
  return launch;
}

void check(const Launch& launch) {
  const auto refuse = [&](const std::string& what) {
    throw UsageError(cat(launch.launcher, "'s variables say ", what));
  };
  if (launch.world_size < 1) refuse("that there are 0 ranks");
  if (launch.rank >= launch.world_size)
    refuse(cat("rank ", launch.rank, " of ", launch.world_size, " ranks"));
  if (launch.local_world_size > launch.world_size)
    refuse(
        cat(launch.local_world_size, " ranks on this machine, but ", launch.world_size, " in all"));
  if (launch.local_world_size > 0 && launch.local_rank >= launch.local_world_size)
    refuse(cat("local rank ", launch.local_rank, " of ", launch.local_world_size,
               " ranks on this machine"));
  if (launch.local_rank > launch.rank)
    refuse(cat("local rank ", launch.local_rank, " for rank ", launch.rank));
}

}  // namespace

std::string first_host(const std::string& list) {
  const size_t end = list.find_first_of("[,");
  std::string host = list.substr(0, end);
  if (end != std::string::npos && list[end] == '[') {
    const size_t stop = list.find_first_of("-,]", end + 1);
    MEGATRON_CHECK(stop != std::string::npos, "the Slurm list of hosts \"", list,
                   "\" has an open bracket");
    host += list.substr(end + 1, stop - end - 1);
    const size_t close = list.find(']', end);
    MEGATRON_CHECK(close != std::string::npos, "the Slurm list of hosts \"", list,
                   "\" has an open bracket");
    host += list.substr(close + 1, list.find_first_of("[,", close) - close - 1);
  }
  return host;
}

Launch launch_from_environment(const Environment& environment) {
  const Variables variables(environment, "");
  const auto any = [&](const char* a, const char* b) {
    return variables.has(a) || variables.has(b);
  };
  Launch launch;
  if (any("RANK", "WORLD_SIZE")) {
    launch = from_torchrun(environment);
  } else if (any("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) {
    launch = from_open_mpi(environment);
  } else if (any("PMI_RANK", "PMI_SIZE") &&
             (variables.has("MPI_LOCALRANKID") || !variables.has("SLURM_PROCID"))) {
    launch = from_mpich(environment);  // srun, too, may set PMI's variables, without the local ones
  } else if (variables.has("SLURM_PROCID")) {
    launch = from_slurm(environment);
  }
  check(launch);
  return launch;
}

Launch launch_from_environment() {
  return launch_from_environment([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace megatron
