#include "megatron/comm/control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/collective_history.h"
#include "megatron/comm/detail/serial_worker.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

// Ranks as threads that share a table in this process.
void run_with_store(int size, const std::function<void(Store&, int rank)>& body) {
  const std::shared_ptr<Store> store = make_local_store();
  run_ranks(size, [&](const std::shared_ptr<Backend>& world) {
    const std::shared_ptr<Store> mine = store->connection("job");
    body(*mine, world->rank());
  });
}

TEST(Store, KeepsClaimsAndCounts) {
  const std::shared_ptr<Store> store = make_local_store();
  EXPECT_FALSE(store->find("key"));
  store->set("key", "value");
  EXPECT_EQ(store->find("key"), "value");
  EXPECT_EQ(store->wait("key", 1), "value");
  EXPECT_EQ(store->claim("owner", "first"), "first");
  EXPECT_EQ(store->claim("owner", "second"), "first");
  EXPECT_EQ(store->add("count", 2), 2);
  EXPECT_EQ(store->add("count", 3), 5);
  store->append("list", "a");
  store->append("list", "b");
  EXPECT_EQ(store->find("list"), "ab");
  const std::shared_ptr<Store> inner = store->connection("inner");
  EXPECT_FALSE(inner->find("key"));
  inner->set("key", "other");
  EXPECT_EQ(store->find("key"), "value");
  store->erase("key");
  EXPECT_FALSE(store->find("key"));
  try {
    store->wait("never", 0.05);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        testing::HasSubstr("no rank wrote never to the store at this process within 0.05 s"));
  }
}

TEST(ControlChannel, GathersAndBroadcasts) {
  run_with_store(4, [](Store& store, int rank) {
    ControlChannel channel(store, "test", rank, 4, 10);
    for (int i = 0; i < 5; ++i) {
      const std::vector<std::string> texts = channel.gather(cat(rank, "/", i));
      if (rank == 0)
        EXPECT_THAT(texts,
                    testing::ElementsAre(cat("0/", i), cat("1/", i), cat("2/", i), cat("3/", i)));
      else
        EXPECT_TRUE(texts.empty());
      EXPECT_EQ(channel.broadcast(cat("from ", rank, " in ", i)), cat("from 0 in ", i));
      EXPECT_EQ(channel.broadcast(""), "");
    }
  });
}

TEST(ControlChannel, ChannelsDoNotDisturbOneAnother) {
  run_with_store(2, [](Store& store, int rank) {
    ControlChannel training(store, "training", rank, 2, 10),
        checkpoint(store, "checkpoint", rank, 2, 10);
    std::thread background([&] {
      for (int i = 0; i < 10; ++i)
        EXPECT_EQ(checkpoint.broadcast(cat("checkpoint ", i)), cat("checkpoint ", i));
    });
    for (int i = 0; i < 10; ++i) EXPECT_EQ(training.broadcast(cat("step ", i)), cat("step ", i));
    background.join();
  });
}

TEST(ControlChannel, TheDeadlineNamesTheRankThatDidNotCome) {
  const std::shared_ptr<Store> store = make_local_store();
  ControlChannel zero(*store, "save", 0, 3, 0.05), one(*store, "save", 1, 3, 0.05);
  one.gather("here");
  EXPECT_EQ(error_of([&] { zero.gather("here"); }),
            "gather 1 of the channel save: rank 2 did not arrive and made no progress for 0.05 s"
            "\nhint: it is stuck in a file system or in a loop; see its log");
  EXPECT_THAT(error_of([&] { one.broadcast(""); }),
              testing::HasSubstr("broadcast 2 of the channel save: rank 0 did not arrive and made "
                                 "no progress for 0.05 s"));
  try {
    zero.gather("again");
  } catch (const CollectiveError& error) {
    EXPECT_EQ(error.culprit, 1);
  }
}

// A rank that works for many times the timeout is waited for, by those too who wait for it through
// rank 0; one that stops in between is named by all.
TEST(ControlChannel, DeadlinesCountTimeWithoutProgress) {
  constexpr double kTimeout = 1;
  for (const bool stops : {false, true}) {
    std::vector<std::string> outcomes(3);
    std::atomic<bool> release{false};
    const std::shared_ptr<Store> store = make_local_store();
    const auto rank_of = [&](int rank) {
      ControlChannel channel(*store->connection("job"), "save", rank, 3, kTimeout);
      const auto begin = std::chrono::steady_clock::now();
      try {
        if (rank == 2) {
          while (std::chrono::steady_clock::now() - begin <
                 std::chrono::duration<double>((stops ? 2 : 4) * kTimeout)) {
            channel.progress();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          while (stops && !release) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        channel.gather("part");
        outcomes[rank] = channel.broadcast("whole");
      } catch (const CollectiveError& error) {
        outcomes[rank] = cat("blames ", error.culprit);
        if (rank == 0) release = true;
      }
    };
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) ranks.emplace_back(rank_of, rank);
    for (std::thread& rank : ranks) rank.join();
    if (stops) {
      EXPECT_EQ(outcomes[0], "blames 2");
    } else {
      EXPECT_THAT(outcomes, testing::Each("whole"));
    }
  }
}

TEST(ControlChannel, LeavesNothingInTheStore) {
  const std::shared_ptr<Store> store = make_local_store();
  ControlChannel zero(*store, "c", 0, 2, 5), one(*store, "c", 1, 2, 5);
  one.gather("x");
  zero.gather("y");
  zero.broadcast("z");
  one.broadcast("");
  EXPECT_FALSE(store->find("control/c/gather/1/1"));
  EXPECT_FALSE(store->find("control/c/broadcast/2"));
  const std::string text(size_t{9} << 20, 'x');
  one.gather(text);
  EXPECT_TRUE(store->find("control/c/gather/3/1/2"));
  zero.gather("");
  for (const char* piece : {"", "/1", "/2"})
    EXPECT_FALSE(store->find(cat("control/c/gather/3/1", piece)));
}

TEST(SerialWorker, RunsTasksInOrderAndKeepsTheirErrors) {
  SerialWorker worker;
  std::vector<int> order;
  std::vector<std::shared_ptr<Task>> tasks;
  for (int i = 0; i < 100; ++i) tasks.push_back(worker.post([&order, i] { order.push_back(i); }));
  const auto failing = worker.post([] { throw Error("no"); });
  const auto after = worker.post([&order] { order.push_back(100); });
  after->wait();
  EXPECT_TRUE(failing->finished());
  EXPECT_THROW(failing->wait(), Error);
  ASSERT_EQ(order.size(), 101u);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(SerialWorker, AStuckTaskDoesNotHoldUpTheEnd) {
  auto begun = std::make_shared<std::atomic<bool>>(false),
       release = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<Task> stuck, waiting;
  {
    SerialWorker worker;
    stuck = worker.post([begun, release] {
      *begun = true;
      while (!*release) std::this_thread::yield();
    });
    waiting = worker.post([] {});
    while (!*begun) std::this_thread::yield();
  }
  EXPECT_FALSE(stuck->finished());
  EXPECT_THROW(waiting->wait(), Error);
  *release = true;
  stuck->wait();
}

TEST(CollectiveHistory, RecordsCallsOfGroupsAndSubgroups) {
  run_ranks(4, [](const std::shared_ptr<Backend>& world) {
    auto history = std::make_shared<CollectiveHistory>();
    const ProcessGroup all(record_calls(world, history), "world");
    const int rank = all.rank();
    all.all_reduce(at::ones({3}))->wait();
    const ProcessGroup pair = all.subgroup({rank / 2 * 2, rank / 2 * 2 + 1}, "tp");
    pair.all_gather(at::empty({4}, at::kBFloat16), at::ones({2}, at::kBFloat16))->wait();
    pair.barrier();
    pair.broadcast(at::ones({1}), 1)->wait();
    HistorySnapshot snapshot = history->snapshot();
    EXPECT_TRUE(snapshot.under_way.empty());
    ASSERT_EQ(snapshot.finished.size(), 4u);
    EXPECT_EQ(to_string(snapshot.finished[0]),
              "all_reduce of 3 x F32 (12 B) over world {0, 1, 2, 3}, number 1");
    const std::string tp = rank < 2 ? "tp {0, 1}" : "tp {2, 3}";
    EXPECT_EQ(to_string(snapshot.finished[1]),
              cat("all_gather of 2 x BF16 (4 B) over ", tp, ", number 1"));
    EXPECT_EQ(to_string(snapshot.finished[2]), cat("barrier over ", tp, ", number 2"));
    EXPECT_EQ(to_string(snapshot.finished[3]), cat("broadcast from rank ", rank < 2 ? 1 : 3,
                                                   " of 1 x F32 (4 B) over ", tp, ", number 3"));
    // A receive is under way from when it is posted to when its message is there.
    const int peer = rank ^ 1;
    const auto receive = all.recv(at::empty({2}), peer);
    EXPECT_EQ(history->snapshot().under_way.size(), 1u);
    EXPECT_GT(history->oldest_age(), 0);
    all.barrier();  // nobody sends before all have looked
    all.send(at::ones({2}), peer)->wait();
    receive->wait();
    EXPECT_EQ(history->oldest_age(), 0);
    snapshot = history->snapshot();
    EXPECT_EQ(snapshot.issued.at(cat("world from ", rank, " to ", peer, " (sent)")), 1);
    EXPECT_EQ(snapshot.issued.at(cat("world from ", peer, " to ", rank, " (received)")), 1);
    // A second group of the same name and ranks counts for itself.
    all.subgroup({rank / 2 * 2, rank / 2 * 2 + 1}, "tp").barrier();
    EXPECT_EQ(history->snapshot().finished.back().sequence, 1);
    all.barrier();
  });
}

TEST(CollectiveHistory, RemembersTheLastCallsOnly) {
  run_ranks(2, [](const std::shared_ptr<Backend>& world) {
    auto history = std::make_shared<CollectiveHistory>(3);
    const ProcessGroup all(record_calls(world, history), "world");
    for (int i = 0; i < 10; ++i) all.barrier();
    const HistorySnapshot snapshot = history->snapshot();
    ASSERT_EQ(snapshot.finished.size(), 3u);
    EXPECT_EQ(snapshot.finished.back().sequence, 10);
    EXPECT_EQ(snapshot.issued.at("world"), 10);
  });
}

}  // namespace
}  // namespace megatron
