// Ranks as processes over Gloo serve what one rank serves. The test starts this program once for
// each rank.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/free_port.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

constexpr int kTensor = 2, kStages = 2;

ModelConfig divided_model() {
  ModelConfig config = small_served_model();
  config.transformer.num_layers = 4;
  return config;
}

// One rank; started by the test below.
TEST(RankProcess, DISABLED_Serves) {
  const Launch launch = launch_from_environment();
  CommConfig comm;
  comm.distributed_timeout_minutes = 1;
  const Connection connection = connect(launch, comm, at::kCPU);
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = kTensor;
  parallel.pipeline_model_parallel_size = kStages;
  const ParallelGroups groups = make_parallel_groups(parallel, connection.world);
  Served served(Served::make(divided_model(), groups));
  std::mt19937 random(6);
  const std::vector<DrivenSequence> given = random_sequences(random, 5);
  for (const int64_t in_flight : {1, 3}) {
    ModelRunner runner(*served.model, *served.weights, small_runner(16));
    std::vector<DrivenSequence> got = given;
    drive_ranks(groups.world, runner, {.preempt = 0.2, .share = 0.5, .in_flight = in_flight}, 1,
                got);
    if (launch.rank != 0) continue;
    const ParallelGroups one;
    Served whole(Served::make(divided_model(), one));
    expect_equal(got, all_alone(*whole.model, given), cat(in_flight, " in flight"));
  }
}

pid_t start_rank(int rank, const std::string& port) {
  std::vector<std::string> variables = {cat("RANK=", rank),
                                        cat("LOCAL_RANK=", rank),
                                        "WORLD_SIZE=4",
                                        "LOCAL_WORLD_SIZE=4",
                                        "GROUP_RANK=0",
                                        "MASTER_ADDR=127.0.0.1",
                                        cat("MASTER_PORT=", port),
                                        "TORCHELASTIC_RUN_ID=none",
                                        "TORCHELASTIC_USE_AGENT_STORE=False",
                                        "OMP_NUM_THREADS=1"};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (!text.starts_with("GTEST_") && !text.starts_with("OMP_")) variables.push_back(text);
  }
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  std::vector<std::string> arguments = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                                        "--gtest_brief=1",
                                        "--gtest_filter=RankProcess.DISABLED_Serves"};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environment.data()),
            0);
  return pid;
}

TEST(RankProcesses, ServeWhatOneRankServes) {
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kTensor * kStages; ++rank) ranks.push_back(start_rank(rank, port));
  for (const pid_t rank : ranks) {
    int status = -1;
    waitpid(rank, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace megatron
