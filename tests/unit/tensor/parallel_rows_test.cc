// Tasks on ATen's threads.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "megatron/tensor/detail/launch.h"

namespace megatron {
namespace {

class ParallelTasks : public testing::Test {
 protected:
  ~ParallelTasks() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(ParallelTasks, EveryOneIsDoneOnce) {
  for (const int threads : {1, 2, 3})
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 1001})
      for (const int64_t grain : {1, 2, 300, 5000}) {
        at::set_num_threads(threads);
        std::vector<std::atomic<int>> done(static_cast<size_t>(count));
        parallel_tasks(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++done[static_cast<size_t>(i)];
        });
        for (int64_t i = 0; i < count; ++i)
          ASSERT_EQ(done[static_cast<size_t>(i)], 1)
              << i << " of " << count << ", " << threads << " threads, at least " << grain;
      }
}

// One thread stays in its first part until the others have done all that it has not begun.
TEST_F(ParallelTasks, OfASlowThreadAreTakenOver) {
  at::set_num_threads(2);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::atomic<int64_t> done = 0;
  parallel_tasks(64, 1, [&](int64_t begin, int64_t end) {
    while (begin == 0 && done + end < 64 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    done += end - begin;
  });
  EXPECT_EQ(done, 64);
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
}

TEST_F(ParallelTasks, PassExceptionsOn) {
  at::set_num_threads(2);
  const auto fails = [](int64_t, int64_t end) {
    if (end == 64) throw std::runtime_error("the last one");
  };
  EXPECT_THROW(parallel_tasks(64, 1, fails), std::runtime_error);
}

}  // namespace
}  // namespace megatron
