#include "megatron/comm/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "megatron/base/check.h"
#include "megatron/comm/rendezvous.h"

namespace megatron {
namespace {

using Variables = std::map<std::string, std::string>;

Launch launch(const Variables& variables) {
  return launch_from_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    launch(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "not refused";
}

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorchrun = {{"RANK", "9"},
                             {"WORLD_SIZE", "16"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "8"},
                             {"GROUP_RANK", "1"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RUN_ID", "job7"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kMpich = {{"PMI_RANK", "3"},
                          {"PMI_SIZE", "4"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"},
                          {"MASTER_ADDR", "a"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "7"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_TASKS_PER_NODE", "4,3"},
                          {"SLURM_STEP_NODELIST", "gpu[007-009,12],login"},
                          {"SLURM_JOB_ID", "123456"},
                          {"SLURM_STEP_ID", "0"}};

TEST(Launch, NoVariablesAreOneRank) {
  const Launch one = launch({});
  EXPECT_EQ(one.rank, 0);
  EXPECT_EQ(one.world_size, 1);
  EXPECT_TRUE(one.one_node());
  EXPECT_FALSE(connect(one, CommConfig(), at::kCPU).world);
}

TEST(Launch, Torchrun) {
  const Launch l = launch(kTorchrun);
  EXPECT_EQ(l.launcher, "torchrun");
  EXPECT_TRUE(l.under_torchrun());
  EXPECT_FALSE(launch(without(kTorchrun, "TORCHELASTIC_RUN_ID")).under_torchrun());
  EXPECT_EQ(l.rank, 9);
  EXPECT_EQ(l.world_size, 16);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.local_world_size, 8);
  EXPECT_EQ(l.node_rank, 1);
  EXPECT_EQ(l.master_addr, "node0");
  EXPECT_EQ(l.master_port, 29400);
  EXPECT_TRUE(l.store_is_hosted);
  EXPECT_EQ(l.run_id, "job7");
  EXPECT_EQ(l.restart_count, 2);
  EXPECT_FALSE(l.one_node());
  EXPECT_FALSE(
      launch(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_hosted);
  // Set by hand, without the number of ranks of the machine.
  EXPECT_EQ(launch(without(kTorchrun, "LOCAL_WORLD_SIZE")).local_world_size, 0);
  EXPECT_EQ(launch(with(without(kTorchrun, "LOCAL_WORLD_SIZE"), {{"MASTER_ADDR", "localhost"}}))
                .local_world_size,
            16);
}

TEST(Launch, TorchrunInsideOfASlurmJobIsTorchrun) {
  Variables both = kTorchrun;
  both.insert(kSlurm.begin(), kSlurm.end());
  EXPECT_EQ(launch(both).launcher, "torchrun");
  EXPECT_EQ(launch(both).rank, 9);
}

TEST(Launch, OpenMpi) {
  const Launch l = launch(kOpenMpi);
  EXPECT_EQ(l.launcher, "mpirun");
  EXPECT_EQ(l.rank, 3);
  EXPECT_EQ(l.world_size, 4);
  EXPECT_EQ(l.local_rank, 3);
  EXPECT_EQ(l.master_addr, "127.0.0.1");
  EXPECT_FALSE(l.store_is_hosted);
  // mpirun inside of a Slurm job: Slurm's variables are those of mpirun's own daemon.
  Variables both = kOpenMpi;
  both.insert(kSlurm.begin(), kSlurm.end());
  EXPECT_EQ(launch(both).world_size, 4);
  EXPECT_THAT(
      refusal(with(kOpenMpi,
                   {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}})),
      testing::HasSubstr("MASTER_ADDR is not set, but mpirun started 4 ranks on several machines"));
}

TEST(Launch, Mpich) {
  const Launch l = launch(kMpich);
  EXPECT_EQ(l.launcher, "mpirun");
  EXPECT_EQ(l.rank, 3);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.local_world_size, 2);
  EXPECT_EQ(l.master_addr, "a");
}

TEST(Launch, Slurm) {
  const Launch l = launch(kSlurm);
  EXPECT_EQ(l.launcher, "srun");
  EXPECT_EQ(l.rank, 5);
  EXPECT_EQ(l.world_size, 7);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.local_world_size, 3);
  EXPECT_EQ(l.node_rank, 1);
  EXPECT_EQ(l.master_addr, "gpu007");
  EXPECT_EQ(l.master_port, 20000 + 123456 % 10000);
  EXPECT_EQ(l.run_id, "slurm-123456-0");
  const Launch named = launch(with(kSlurm, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "7000"}}));
  EXPECT_EQ(named.master_addr, "head");
  EXPECT_EQ(named.master_port, 7000);
  // srun's plugin for PMI sets these, too, without local ones.
  EXPECT_EQ(launch(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "7"}})).launcher, "srun");
  EXPECT_EQ(launch(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"}})).local_world_size, 3);
  // A step of fewer tasks than the job has.
  EXPECT_EQ(launch(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "6"}})).world_size, 6);
  EXPECT_EQ(launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}).world_size, 1);
  // An interactive job's shell has the number of tasks but is none of them.
  EXPECT_EQ(launch({{"SLURM_NTASKS", "8"}}).world_size, 1);
}

TEST(Launch, FirstHostOfASlurmList) {
  EXPECT_EQ(first_host("node7"), "node7");
  EXPECT_EQ(first_host("node7,node8"), "node7");
  EXPECT_EQ(first_host("node[07-09]"), "node07");
  EXPECT_EQ(first_host("rack[3,5]-gpu,node9"), "rack3-gpu");
  EXPECT_THROW(first_host("node[7"), Error);
}

TEST(Launch, IncompleteSetsAreRefused) {
  EXPECT_EQ(refusal({{"RANK", "0"}}),
            "WORLD_SIZE is not set, but RANK is\nhint: torchrun sets both; unset the other one to "
            "run one rank");
  EXPECT_THAT(refusal({{"WORLD_SIZE", "2"}}),
              testing::HasSubstr("RANK is not set, but WORLD_SIZE is"));
  EXPECT_THAT(refusal(without(kTorchrun, "LOCAL_RANK")),
              testing::HasSubstr("LOCAL_RANK is not set, but RANK is"));
  EXPECT_EQ(
      refusal(without(kTorchrun, "MASTER_ADDR")),
      "MASTER_ADDR is not set, but WORLD_SIZE is 16\nhint: start with torchrun, which sets it");
  EXPECT_THAT(refusal(without(kTorchrun, "MASTER_PORT")),
              testing::HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(refusal(without(kOpenMpi, "OMPI_COMM_WORLD_SIZE")),
              testing::HasSubstr("OMPI_COMM_WORLD_SIZE is not set"));
  EXPECT_THAT(refusal(without(kMpich, "MPI_LOCALNRANKS")),
              testing::HasSubstr("MPI_LOCALNRANKS is not set"));
  EXPECT_THAT(refusal(without(kSlurm, "SLURM_LOCALID")),
              testing::HasSubstr("SLURM_LOCALID is not set"));
  EXPECT_THAT(refusal(without(kSlurm, "SLURM_NTASKS")),
              testing::HasSubstr("SLURM_NTASKS is not set, but SLURM_PROCID is"));
  EXPECT_THAT(refusal(without(kSlurm, "SLURM_STEP_NODELIST")),
              testing::HasSubstr("MASTER_ADDR is not set, but srun started 7"));
}

TEST(Launch, ContradictionsAreRefused) {
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "16"}})),
            "torchrun's variables say rank 16 of 16 ranks");
  EXPECT_EQ(refusal(with(kTorchrun, {{"LOCAL_RANK", "8"}})),
            "torchrun's variables say local rank 8 of 8 ranks on this machine");
  EXPECT_EQ(refusal(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "17"}})),
            "torchrun's variables say 17 ranks on this machine, but 16 in all");
  EXPECT_EQ(refusal(with(kTorchrun, {{"WORLD_SIZE", "0"}, {"RANK", "0"}})),
            "torchrun's variables say that there are 0 ranks");
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "0"}})),
            "torchrun's variables say local rank 1 for rank 0");
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "two"}})), "RANK is \"two\", expected a number");
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "-1"}})), "RANK is \"-1\", expected a number");
  EXPECT_EQ(refusal(with(kTorchrun, {{"MASTER_PORT", "70000"}})),
            "MASTER_PORT is 70000, expected 1 to 65535");
  EXPECT_EQ(refusal(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "7"}})),
            "SLURM_STEP_TASKS_PER_NODE is \"7\", which has no entry for node 1");
}

TEST(CommConfig, TimeoutsAndBackendsAreChecked) {
  CommConfig config;
  EXPECT_EQ(config.timeout_seconds(), 600);
  EXPECT_EQ(config.timeout_seconds_after_init(), 600);
  config.distributed_timeout_seconds_after_init = 30;
  EXPECT_EQ(config.timeout_seconds_after_init(), 30);
  Violations none;
  config.validate(none);
  EXPECT_TRUE(none.empty());
  config.distributed_timeout_minutes = 0;
  config.distributed_timeout_seconds_after_init = 0;
  Violations two;
  config.validate(two);
  EXPECT_EQ(two.messages().size(), 2u);

  Launch launch;
  launch.world_size = 2;
  config.distributed_backend = DistributedBackend::kNccl;
  EXPECT_THROW(connect(launch, config, at::kCPU), UsageError);
  config.distributed_backend = DistributedBackend::kGloo;
  EXPECT_THROW(connect(launch, config, at::Device(at::kCUDA, 0)), UsageError);
}

}  // namespace
}  // namespace megatron
