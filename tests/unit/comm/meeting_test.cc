// The meeting at the store, with many simulated ranks: a process holds the store, and threads of
// this one are the ranks, each with as many connections as a rank of a job has.
// MEGATRON_SIMULATED_RANKS=4096 makes more of them.
#include "megatron/comm/meeting.h"

#include <c10/util/Logging.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "megatron/comm/detail/store_probe.h"

namespace megatron {
namespace {

using testing::HasSubstr;

constexpr int kConnections = 5;  // of a rank of a job to the store

int simulated_ranks() {
  const char* given = std::getenv("MEGATRON_SIMULATED_RANKS");
  return given != nullptr ? std::atoi(given) : 256;
}

// A port that nobody uses at the moment.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

// A process that holds a store, as a launcher's agent does, with a limit of open files that it
// raises itself.
class Holder {
 public:
  Holder() : port_(free_port()) {
    if (pipe(alive_) != 0) std::abort();
    pid_ = fork();
    if (pid_ != 0) {
      close(alive_[0]);
      wait_for_store("127.0.0.1", port_, 60);
      return;
    }
    close(alive_[1]);
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 256);
    setrlimit(RLIMIT_NOFILE, &limit);
    raise_open_files_limit();
    StoreAddress address;
    address.port = port_;
    address.host_here = true;
    address.bind_address = "127.0.0.1";
    const std::shared_ptr<Store> store = make_tcp_store(address);
    char byte;
    [[maybe_unused]] const ssize_t got = read(alive_[0], &byte, 1);  // until the other end closes
    std::_Exit(0);
  }
  ~Holder() {
    close(alive_[1]);
    waitpid(pid_, nullptr, 0);
  }
  int port() const { return port_; }

 private:
  int port_;
  int alive_[2];
  pid_t pid_;
};

struct Outcome {
  std::vector<std::string> errors;  // what ranks say, in no order
  int quiet = 0;                    // ranks that leave because another one speaks
  int started = 0;
  double seconds = 0;
};

// Ranks as threads; `settings` of each.
Outcome run(const Holder& holder, int size, const std::function<RankSettings(int rank)>& settings) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 512 << 10);
  pthread_setattr_default_np(&attributes);
  raise_open_files_limit();
  // As connect() does: c10d warns of each connection of an address without a name
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  Outcome outcome;
  std::mutex mutex;
  const auto rank_body = [&](int rank) {
    Launch launch;
    launch.rank = rank;
    launch.world_size = size;
    launch.store_is_hosted = true;
    StoreAddress address;
    address.port = holder.port();
    address.prefix = "job";
    address.timeout_seconds = 300;
    std::string error;
    bool quiet = false;
    try {
      const std::shared_ptr<Store> store = make_tcp_store(address);
      std::vector<std::shared_ptr<Store>> more;
      while (more.size() + 1 < kConnections) more.push_back(store->connection("more"));
      const std::vector<Neighbour> neighbours = meet(launch, *store, settings(rank), 300);
      if (static_cast<int>(neighbours.size()) != size - 1) error = "neighbours are missing";
    } catch (const StartRefused&) {
      quiet = true;
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    const std::lock_guard lock(mutex);
    if (!error.empty()) outcome.errors.push_back(error);
    outcome.quiet += quiet;
    outcome.started += error.empty() && !quiet;
  };
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank_body, rank);
  for (std::thread& rank : ranks) rank.join();
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return outcome;
}

TEST(Meeting, ManyRanksThatAgreeStart) {
  const int size = simulated_ranks();
  const Holder holder;
  const Outcome outcome = run(holder, size, [](int) { return RankSettings{{"--lr", "0.1"}}; });
  EXPECT_EQ(outcome.started, size) << (outcome.errors.empty() ? "" : outcome.errors[0]);
  std::printf("%d simulated ranks with %d connections each met in %.2f s\n", size, kConnections,
              outcome.seconds);
}

TEST(Meeting, OneRankOfManyThatDiffersIsNamedOnce) {
  const int size = simulated_ranks();
  const Holder holder;
  const Outcome outcome = run(holder, size, [&](int rank) {
    return RankSettings{{"--lr", rank == size - 2 ? "0.2" : "0.1"}};
  });
  EXPECT_EQ(outcome.quiet, size - 1);
  ASSERT_EQ(outcome.errors.size(), 1u);
  EXPECT_THAT(outcome.errors[0], HasSubstr(cat("--lr is 0.1 on ranks 0-", size - 3, ", ", size - 1,
                                               " and 0.2 on rank ", size - 2)));
  std::printf("%d simulated ranks, of which one differs, left in %.2f s\n", size, outcome.seconds);
}

TEST(Meeting, RanksThatAllDifferAreNamed) {
  const Holder holder;
  const Outcome outcome =
      run(holder, 12, [](int rank) { return RankSettings{{"--seed", cat(rank)}}; });
  EXPECT_EQ(outcome.quiet, 11);
  ASSERT_EQ(outcome.errors.size(), 1u);
  EXPECT_THAT(outcome.errors[0], HasSubstr("--seed is 0 on rank 0, 1 on rank 1,"));
  EXPECT_THAT(outcome.errors[0], HasSubstr("and 4 other values elsewhere"));
}

TEST(Store, OpenFilesMayBeAsManyAsTheSystemAllows) {
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_max, 300);
  setrlimit(RLIMIT_NOFILE, &low);
  EXPECT_GE(raise_open_files_limit(), 300);
  rlimit after{};
  getrlimit(RLIMIT_NOFILE, &after);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
}

}  // namespace
}  // namespace megatron
