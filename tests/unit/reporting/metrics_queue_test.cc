#include "megatron/reporting/metrics_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// What a sink has taken, for the test, which outlives it; and a door that may be shut.
struct Taken {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true;
  bool broken = false;
  bool names_itself = true;  // in its error
  std::vector<std::string> records;
  size_t num_scalars = 0;
  bool closed = false;

  void set_open(bool value) {
    const std::lock_guard lock(mutex);
    open = value;
    changed.notify_all();
  }
};

class TestSink final : public MetricsSink {
 public:
  TestSink(std::string name, std::shared_ptr<Taken> taken)
      : name_(std::move(name)), taken_(std::move(taken)) {}
  std::string name() const override { return name_; }
  void record(const MetricsRecord& record) override {
    std::unique_lock lock(taken_->mutex);
    taken_->changed.wait(lock, [&] { return taken_->open; });
    MEGATRON_CHECK(!taken_->broken, taken_->names_itself ? name_ : "a folder",
                   " cannot be written: no reason");
    taken_->records.push_back(cat(record.type(), " ", record.number("n").value_or(-1)));
    taken_->changed.notify_all();
  }
  bool takes_scalars() const override { return true; }
  void scalars(const ScalarSet& set) override {
    const std::lock_guard lock(taken_->mutex);
    taken_->num_scalars += set.values.size();
  }
  void close() override { taken_->closed = true; }

 private:
  std::string name_;
  std::shared_ptr<Taken> taken_;
};

MetricsQueue queue_to(const std::vector<std::shared_ptr<Taken>>& taken,
                      MetricsQueue::Options options = {}) {
  std::vector<std::unique_ptr<MetricsSink>> sinks;
  for (size_t i = 0; i < taken.size(); ++i)
    sinks.push_back(std::make_unique<TestSink>(cat("sink", i), taken[i]));
  return MetricsQueue(std::move(sinks), options);
}

MetricsRecord numbered(const char* type, int n) {
  MetricsRecord record(type);
  record.member("n", n);
  return record;
}

TEST(MetricsQueue, EverythingArrivesInOrderBeforeItEnds) {
  const auto taken = std::make_shared<Taken>();
  {
    MetricsQueue queue = queue_to({taken});
    EXPECT_TRUE(queue.takes_scalars());
    for (int i = 0; i < 1000; ++i) queue.write(numbered("train", i));
    queue.write(ScalarSet{1, 2, {{"a", 1}, {"b", 2}}});
    queue.write(ScalarSet{1, 2, {}});
  }
  ASSERT_EQ(taken->records.size(), 1000u);
  EXPECT_EQ(taken->records.back(), "train 999");
  EXPECT_EQ(taken->num_scalars, 2u);
  EXPECT_TRUE(taken->closed);
}

// The thread that writes neither waits for the sink nor for more than the queue holds; the other
// sink gets everything.
TEST(MetricsQueue, ASinkThatHangsLosesRecordsAndStopsNobody) {
  const auto slow = std::make_shared<Taken>(), quick = std::make_shared<Taken>();
  slow->open = false;
  testing::internal::CaptureStderr();
  {
    MetricsQueue queue = queue_to({slow, quick}, {.capacity = 3, .patience_seconds = 60});
    for (int i = 0; i < 10; ++i) {
      queue.write(numbered("train", i));
      std::unique_lock lock(quick->mutex);  // the other sink's queue is as short
      quick->changed.wait(lock,
                          [&] { return quick->records.size() == static_cast<size_t>(i) + 1; });
    }
    queue.write(numbered("end", 10));
    slow->set_open(true);
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(quick->records.size(), 11u);
  // One is being written, or none yet; three are queued; the end is never dropped.
  EXPECT_THAT(slow->records.size(), testing::AnyOf(4u, 5u));
  EXPECT_EQ(slow->records.front(), "train 0");
  EXPECT_EQ(slow->records.back(), "end 10");
  const size_t dropped = 11 - slow->records.size();
  EXPECT_THAT(log, HasSubstr("sink0 is too slow: some records are dropped"));
  EXPECT_THAT(log, HasSubstr(cat("sink0 is incomplete: 0 writes failed, ", dropped,
                                 " records were dropped")));
  EXPECT_THAT(log, Not(HasSubstr("sink1")));
  EXPECT_EQ(log.find("too slow"), log.rfind("too slow")) << log;
}

TEST(MetricsQueue, ASinkThatNeverComesBackIsGivenUp) {
  const auto stuck = std::make_shared<Taken>();
  stuck->open = false;
  testing::internal::CaptureStderr();
  {
    MetricsQueue queue = queue_to({stuck}, {.capacity = 8, .patience_seconds = 0.05});
    queue.write(numbered("train", 1));
    queue.flush();
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("sink0 has made no progress for 0.05 seconds and is abandoned"));
  EXPECT_FALSE(stuck->closed);
  stuck->set_open(true);  // lets the thread end
}

TEST(MetricsQueue, AFailureIsReportedOnceAndLaterRecordsAreTried) {
  const auto taken = std::make_shared<Taken>();
  taken->broken = true;
  testing::internal::CaptureStderr();
  {
    MetricsQueue queue = queue_to({taken});
    queue.write(numbered("train", 1));
    queue.write(numbered("train", 2));
    queue.flush();
    {
      const std::lock_guard lock(taken->mutex);
      taken->broken = false;
    }
    queue.write(numbered("train", 3));
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(taken->records, ElementsAre("train 3"));
  EXPECT_THAT(
      log,
      HasSubstr("warning: sink0 cannot be written: no reason; training continues without it\n"));
  EXPECT_THAT(log, HasSubstr("sink0 is incomplete: 2 writes failed, 0 records were dropped"));
  EXPECT_EQ(log.find("no reason"), log.rfind("no reason")) << log;
}

TEST(MetricsQueue, AWarningNamesTheSink) {
  const auto taken = std::make_shared<Taken>();
  taken->broken = true;
  taken->names_itself = false;
  testing::internal::CaptureStderr();
  queue_to({taken}).write(numbered("train", 1));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("warning: sink0: a folder cannot be written: no reason; training"));
}

TEST(MetricsQueue, WithoutSinksNothingIsKept) {
  MetricsQueue queue;
  EXPECT_FALSE(queue.is_open());
  EXPECT_FALSE(queue.takes_scalars());
  queue.write(numbered("start", 1));
  queue.flush();
  queue.close();
}

TEST(MetricsRecord, FindsNumbersAndTexts) {
  MetricsRecord record("train");
  record.member("iteration", 3)
      .member("loss", 2.5)
      .member("device", "cpu")
      .member("last", true)
      .json("mesh", "[1]");
  EXPECT_EQ(record.number("iteration"), 3.0);
  EXPECT_EQ(record.number("loss"), 2.5);
  EXPECT_EQ(record.number("device"), std::nullopt);
  EXPECT_EQ(record.text("device"), "cpu");
  EXPECT_EQ(record.text("loss"), "");
}

}  // namespace
}  // namespace megatron
