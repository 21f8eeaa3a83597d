// One rank of tests/parallel/processes/checkpoints_test.py: `checkpoint_ranks <case> <root>
// <timeout in seconds>`.
//
//   write  one process writes iterations 1 and 2 of MEGATRON_TEST_MIB MiB each
//   start  the ranks decide together where to start and load a part each
//   save   the ranks start, then save step after step until they are killed
//   busy   rank 1 makes progress for three timeouts while the others wait for it in a collective
//
// MEGATRON_TEST_READ_MB_S: each process reads its tensor files at most this fast.
// MEGATRON_TEST_HANG_RANK: this rank hangs in the middle of its reading.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/runtime/channel_agreement.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

// The weights of step `seed`, of which this rank holds an equal stretch.
struct Weights {
  Weights(int64_t total, int rank, int size)
      : total(total),
        begin(total / size * rank),
        end(rank + 1 == size ? total : total / size * (rank + 1)),
        values(static_cast<size_t>(end - begin)) {}
  static uint32_t value(int64_t seed, int64_t index) {
    return static_cast<uint32_t>(seed * 1000003 + index * 2654435761);
  }
  void fill(int64_t seed) {
    for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i - begin)] = value(seed, i);
  }
  void expect(int64_t seed) const {
    for (int64_t i = begin; i < end; ++i)
      MEGATRON_CHECK(values[static_cast<size_t>(i - begin)] == value(seed, i), "element ", i,
                     " of iteration ", seed, " is another");
  }
  ShardedTensor tensor() {
    return {"w", DType::kInt32, {total}, {total}, {}, begin, end, 0, values.data()};
  }
  int64_t total, begin, end;
  std::vector<uint32_t> values;
};

SaveRequest request_for(const fs::path& root, int64_t step, Weights& weights,
                        Agreement* agreement) {
  SaveRequest request;
  request.root = root;
  request.iteration = step;
  request.tensors = {weights.tensor()};
  request.state = cat("{\"iteration\": ", step, "}");
  request.files = {{"config.yaml", "seed: 1\n"}};
  request.agreement = agreement;
  return request;
}

// Counts the blocks of tensor files that this process reads; slows it down, or stops it.
std::atomic<int64_t> num_blocks{0};
void install_hook(int rank) {
  const double rate = static_cast<double>(from_environment("MEGATRON_TEST_READ_MB_S", 0));
  const bool hangs = from_environment("MEGATRON_TEST_HANG_RANK", -1) == rank;
  set_io_hook([rate, hangs](IoOp op, const fs::path& path, const fs::path&) {
    if (op != IoOp::kRead || path.extension() != ".safetensors") return 0;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (++num_blocks == 3 && hangs) {
      std::printf("hanging\n");
      std::fflush(stdout);
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    if (rate > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(1048576 / (rate * 1e6)));
    return 0;
  });
}

// The elements of a checkpoint that `write` and `save` make.
int64_t num_elements() { return from_environment("MEGATRON_TEST_MIB", 1) * (1 << 18); }

int64_t start(const fs::path& root, Weights& weights, Agreement& agreement) {
  const StartDecision decision =
      resolve_start({StartMode::kResumeOrFresh, root, root, {}, false}, &agreement);
  if (agreement.rank() == 0)
    for (const std::string& warning : decision.warnings)
      std::printf("passed over %s\n", warning.c_str());
  if (!decision.checkpoint) return 0;
  const Checkpoint checkpoint = Checkpoint::open_verified(decision.checkpoint->directory);
  const std::vector<ShardedTensor> wanted = {weights.tensor()};
  LoadOptions options;
  options.progress = [&] { agreement.progress(); };
  work_together(agreement, [&] { checkpoint.load(wanted, options); });
  weights.expect(checkpoint.iteration());
  return checkpoint.iteration();
}

void be_busy(FailureMonitor& monitor, int rank, double timeout) {
  if (rank != 1) return;
  std::printf("busy\n");
  std::fflush(stdout);
  const bool hangs = from_environment("MEGATRON_TEST_HANG_RANK", -1) == rank;
  const auto end = Clock::now() + std::chrono::duration<double>((hangs ? 1.5 : 3) * timeout);
  while (Clock::now() < end) {
    monitor.progress();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (; hangs; std::this_thread::sleep_for(std::chrono::hours(1))) {
  }
}

int run(const std::string& name, const fs::path& root, double timeout) {
  if (name == "write") {
    Weights weights(num_elements(), 0, 1);
    for (const int64_t step : {1, 2}) {
      weights.fill(step);
      save_checkpoint(request_for(root, step, weights, nullptr));
    }
    return 0;
  }
  const Launch launch = launch_from_environment();
  CommConfig config;
  const Connection connection = connect(launch, config, at::kCPU);
  FailureMonitor monitor(launch, connection, cat("dp ", launch.rank), config.timeout_seconds());
  try {
    const ProcessGroup world(connection.world, "world");
    world.barrier();
    monitor.set_timeout(timeout);
    if (name == "busy") {
      be_busy(monitor, launch.rank, timeout);
      world.barrier();
      return 0;
    }
    ChannelAgreement agreement(*connection.store, launch, timeout, monitor);
    install_hook(launch.rank);
    Weights weights(num_elements(), launch.rank, launch.world_size);
    const auto begin = Clock::now();
    int64_t step = start(root, weights, agreement);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("%s", cat("rank ", launch.rank, " started from ", step, ": read ",
                          num_blocks.load(), " blocks in ", seconds, " s\n")
                          .c_str());
    std::fflush(stdout);
    while (name == "save") {
      weights.fill(++step);
      SaveRequest request = request_for(root, step, weights, &agreement);
      request.retention.keep_last = 2;
      const SaveResult result = save_checkpoint(request);
      for (const std::string& warning : result.warnings)
        std::printf("warning %s\n", warning.c_str());
      if (launch.rank == 0) std::printf("published %lld\n", static_cast<long long>(step));
      std::fflush(stdout);
    }
    world.barrier();
  } catch (const std::exception& error) {
    if (!monitor.fail(error)) std::fprintf(stderr, "error: %s\n", error.what());
    std::_Exit(1);
  }
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  at::set_num_threads(1);
  try {
    return megatron::run(argv[1], argv[2], std::atof(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
