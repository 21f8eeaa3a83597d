// The start-up barrier at the store, with many simulated ranks: another process runs the store, and
// threads of this one are the ranks, each with as many connections as a rank of a job.
// MEGATRON_SIMULATED_RANKS=4096 simulates more of them.
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
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "megatron/comm/c10d_backend.h"
#include "megatron/comm/control.h"
#include "megatron/comm/detail/store_probe.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/free_port.h"

namespace megatron {
namespace {

using testing::HasSubstr;

int simulated_ranks() {
  const char* given = std::getenv("MEGATRON_SIMULATED_RANKS");
  return given != nullptr ? std::atoi(given) : 256;
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
      const std::shared_ptr<Store> nccl = store->connection("nccl");
      const std::shared_ptr<Store> monitor = store->connection("monitor");
      const std::vector<Neighbour> neighbours = meet(launch, *store, settings(rank), 300);
      if (static_cast<int>(neighbours.size()) != size - 1) error = "neighbours are missing";
      monitor->set(cat("beat/", rank), "1");
      ControlChannel agreement(*store, "agreement", rank, size, 300);
      const std::vector<std::string> texts = agreement.gather(std::to_string(rank));
      const std::string all = agreement.broadcast(cat(texts.size(), " ranks"));
      if (all != cat(size, " ranks")) error = cat("agreed on ", all);
      nccl->add("here", 1);
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
  std::printf("%d simulated ranks met and agreed in %.2f s\n", size, outcome.seconds);
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

// Sockets of this process that are connected to the port.
int sockets_to(int port) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    const int fd = std::atoi(entry.path().filename().c_str());
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    const in_port_t at = peer.ss_family == AF_INET6
                             ? reinterpret_cast<const sockaddr_in6&>(peer).sin6_port
                             : reinterpret_cast<const sockaddr_in&>(peer).sin_port;
    count += ntohs(at) == port;
  }
  return count;
}

StoreAddress address_of(const Holder& holder) {
  StoreAddress address;
  address.port = holder.port();
  address.timeout_seconds = 60;
  return address;
}

// Of two ranks in this process: what agrees and Gloo's groups add none to the one of each.
TEST(Store, ARankHasOneSocketForAllThatDoesNotWaitInTheStore) {
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  const Holder holder;
  std::vector<std::shared_ptr<Store>> stores;
  for (int rank = 0; rank < 2; ++rank) stores.push_back(make_tcp_store(address_of(holder)));
  EXPECT_EQ(sockets_to(holder.port()), 2);
  const auto rank_body = [&](int rank) {
    ControlChannel channel(*stores[rank], "agreement", rank, 2, 60);
    channel.gather("text");
    EXPECT_EQ(channel.broadcast("all"), "all");
    C10dOptions options;
    options.rank = rank;
    options.size = 2;
    options.timeout_seconds = 60;
    options.loopback = true;
    const std::shared_ptr<Backend> world = make_gloo_backend(stores[rank], options);
    const std::shared_ptr<Backend> pair =
        world->subgroup({0, 1}, "pair", CommunicatorUse::kExclusive);
    // Connected at the same time, by threads of their own, in another order on each rank
    const at::Tensor one = at::ones({3}), two = at::ones({3});
    const auto first =
        (rank == 0 ? world : pair)->all_reduce(rank == 0 ? one : two, ReduceOp::kSum);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto last = (rank == 0 ? pair : world)->all_reduce(rank == 0 ? two : one, ReduceOp::kSum);
    first->wait();
    last->wait();
    EXPECT_EQ(one.sum().item<float>(), 6);
    EXPECT_EQ(two.sum().item<float>(), 6);
    EXPECT_EQ(sockets_to(holder.port()), 2);
    world->barrier();
  };
  std::thread other(rank_body, 1);
  rank_body(0);
  other.join();
  const std::shared_ptr<Store> own = stores[0]->connection("monitor");
  EXPECT_EQ(sockets_to(holder.port()), 3);
}

// Proofs gather what every rank traced.
TEST(Store, BringsTextsLongerThanOneOfItsValues) {
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  const Holder holder;
  const auto text_of = [](int rank) {
    std::string text((size_t{20} << 20) + 7, 'x');
    for (size_t i = 0; i < text.size(); i += 1000)
      text[i] = static_cast<char>('a' + (i / 1000 + static_cast<size_t>(rank)) % 26);
    return text;
  };
  const auto rank_body = [&](int rank) {
    const std::shared_ptr<Store> store = make_tcp_store(address_of(holder));
    ControlChannel channel(*store, "agreement", rank, 2, 60);
    const std::vector<std::string> texts = channel.gather(text_of(rank));
    if (rank == 0) {
      EXPECT_TRUE((texts == std::vector<std::string>{text_of(0), text_of(1)}));
    }
    EXPECT_TRUE(channel.broadcast(text_of(rank)) == text_of(0));
  };
  std::thread other(rank_body, 1);
  rank_body(0);
  other.join();
}

TEST(Store, WhoWaitsOnAViewHoldsUpNobody) {
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  const Holder holder;
  const std::shared_ptr<Store> store = make_tcp_store(address_of(holder));
  const std::shared_ptr<Store> view = store->view("part");
  std::thread waits([&] {
    EXPECT_THROW(view->wait("never", 1), Error);
    EXPECT_EQ(view->wait("soon", 60), "here");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto began = std::chrono::steady_clock::now();
  store->set("key", "value");
  EXPECT_EQ(store->find("key"), "value");
  EXPECT_FALSE(view->find("key"));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(700));
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  store->set("part/soon", "here");
  waits.join();
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
