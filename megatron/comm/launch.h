// Which rank this process is, according to its launcher: torchrun, Slurm's srun, mpirun. Read from
// the environment.
#pragma once

#include <functional>
#include <string>

namespace megatron {

// Default-constructed: one rank.
struct Launch {
  std::string launcher = "none";  // "torchrun", "srun", "mpirun"; for messages
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // rank on this machine; index of its GPU
  int local_world_size = 1;  // 0: unknown
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  bool store_is_hosted = false;  // the launcher's agent holds the store; otherwise rank 0 does
  std::string run_id;            // the launcher's name of the job, if it has one
  int restart_count = 0;         // how often the launcher has restarted these ranks

  bool one_node() const { return local_world_size == world_size; }
  // torchrun itself: it names the job, others that set its variables do not. It starts the ranks
  // again after every exit code but 0, and kills them 30 s after a signal.
  bool under_torchrun() const { return launcher == "torchrun" && !run_id.empty(); }
};

// Returns the value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Launchers are detected in this order: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR, MASTER_PORT, which other launchers may set too), Open MPI's, MPICH's (Hydra),
// Slurm's. None found: one rank. Throws UsageError if a set of variables is incomplete or
// contradictory.
Launch launch_from_environment(const Environment& environment);
Launch launch_from_environment();

// First host of a Slurm node list: "node[01-03,07],gpu5" gives "node01".
std::string first_host(const std::string& list);

}  // namespace megatron
