// What a history of calls tells while somebody who asks the driver of a GPU is held up.
#include "megatron/comm/collective_history.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

namespace megatron {
namespace {

using std::chrono::seconds;

// Holds up who asks until it is released.
class HeldUp final : public Progress {
 public:
  explicit HeldUp(std::shared_future<void> released) : released_(std::move(released)) {}
  bool finished() const override {
    released_.wait();
    return true;
  }

 private:
  std::shared_future<void> released_;
};

CollectiveCall call_of(const char* op) {
  CollectiveCall call;
  call.op = op;
  call.channel = "world";
  return call;
}

// A thread that asks, and whether it has its answer in time.
template <class F>
bool answers_in_time(const F& ask) {
  std::packaged_task<void()> task(ask);
  const std::future<void> answered = task.get_future();
  std::thread thread(std::move(task));
  const bool in_time = answered.wait_for(seconds(5)) == std::future_status::ready;
  in_time ? thread.join() : thread.detach();
  return in_time;
}

TEST(CollectiveHistory, AnswersWhileTheDriverHoldsUpWhoAsksIt) {
  std::promise<void> release;
  // Not destroyed where a thread of the test is left over.
  auto* history = new CollectiveHistory;
  history->issued(history->begin(call_of("all_reduce")),
                  std::make_shared<HeldUp>(release.get_future().share()));
  HistorySnapshot snapshot;
  ASSERT_TRUE(answers_in_time([&] { snapshot = history->snapshot(); }));
  EXPECT_EQ(snapshot.under_way.size(), 1u);
  ASSERT_TRUE(
      answers_in_time([&] { history->issued(history->begin(call_of("barrier")), nullptr); }));
  double age = 0;
  ASSERT_TRUE(answers_in_time([&] { age = history->oldest_age(); }));
  EXPECT_GT(age, 0.0) << "the call counts as in flight";

  release.set_value();
  for (int i = 0; i < 100 && !snapshot.under_way.empty(); ++i) snapshot = history->snapshot();
  EXPECT_TRUE(snapshot.under_way.empty());
  ASSERT_EQ(snapshot.finished.size(), 2u);
  EXPECT_EQ(snapshot.finished[0].op, "barrier");
  EXPECT_EQ(snapshot.finished[1].op, "all_reduce");
  delete history;
}

}  // namespace
}  // namespace megatron
