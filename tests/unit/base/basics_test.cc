// Errors, element types, formatting, violations and threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/dtype.h"
#include "megatron/base/fields.h"
#include "megatron/base/format.h"
#include "megatron/base/threads.h"

namespace megatron {
namespace {

using testing::HasSubstr;

TEST(Check, ThrowsTheJoinedValues) {
  MEGATRON_CHECK(true, "not thrown");
  try {
    MEGATRON_CHECK(1 > 2, "--a is ", 3, "; expected ", 1.5);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--a is 3; expected 1.5");
  }
  try {
    MEGATRON_ASSERT(1 > 2, "sizes ", 1);
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("internal error: "));
    EXPECT_THAT(error.what(), HasSubstr("basics_test.cc:"));
    EXPECT_THAT(error.what(), HasSubstr("1 > 2: sizes 1"));
  }
}

TEST(DType, NamesAndSizes) {
  for (const char* name : {"F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
    EXPECT_EQ(to_string(dtype_from_string(name)), name);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kInt64), 8);
  EXPECT_THROW(dtype_from_string("F8"), Error);
}

TEST(Violations, AreReportedTogether) {
  Violations v;
  v.throw_if_any();
  v.add("--a is 1", "2 or 3");
  v.add("--b is 2");
  EXPECT_EQ(v.messages().size(), 2u);
  try {
    v.throw_if_any();
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "--a is 1\nhint: 2 or 3\n--b is 2");
  }
}

TEST(Format, Bytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1.0 kB");
  EXPECT_EQ(format_bytes(999960), "1.0 MB");
  EXPECT_EQ(format_bytes(2.84e9), "2.8 GB");
  EXPECT_EQ(format_bytes(1e21), "1000.0 EB");
}

TEST(Format, CountsAndDurations) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(81204), "81,204");
  EXPECT_EQ(format_count(std::numeric_limits<uint64_t>::max()), "18,446,744,073,709,551,615");
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(86400 + 61), "1 day 0:01:01");
  EXPECT_EQ(format_duration(3 * 86400), "3 days 0:00:00");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "?");
  EXPECT_EQ(format_duration(-1), "?");
}

TEST(ParallelFor, CoversEveryIndexOnceInTheSameRanges) {
  const auto ranges = [](int threads) {
    std::mutex mutex;
    std::set<std::pair<int64_t, int64_t>> seen;
    parallel_for(
        1003, 10,
        [&](int64_t begin, int64_t end) {
          const std::lock_guard lock(mutex);
          EXPECT_TRUE(seen.emplace(begin, end).second);
        },
        threads);
    return seen;
  };
  const auto one = ranges(1);
  EXPECT_EQ(one.size(), 101u);
  EXPECT_EQ(*one.rbegin(), std::make_pair(int64_t{1000}, int64_t{1003}));
  EXPECT_EQ(ranges(4), one);
  EXPECT_EQ(ranges(0), one);
}

TEST(ParallelFor, UsesSeveralThreads) {
  std::atomic<int> inside{0};
  parallel_for(
      2, 1,
      [&](int64_t, int64_t) {
        ++inside;
        while (inside < 2) std::this_thread::yield();  // ends only when both ranges run at once
      },
      2);
  EXPECT_EQ(inside, 2);
}

TEST(ParallelFor, RethrowsTheFirstErrorAndStops) {
  for (const int threads : {1, 4}) {
    std::atomic<int> calls{0};
    const auto body = [&](int64_t begin, int64_t) {
      ++calls;
      if (begin >= 5) throw Error("range 5");
    };
    EXPECT_THROW(parallel_for(100000, 1, body, threads), Error);
    EXPECT_LT(calls, 100000);
  }
}

TEST(ParallelFor, NothingToDoAndOddGrains) {
  int calls = 0;
  const auto body = [&](int64_t begin, int64_t end) { calls += static_cast<int>(end - begin); };
  parallel_for(0, 1, body);
  parallel_for(-3, 1, body);
  EXPECT_EQ(calls, 0);
  parallel_for(5, 0, body, 1);
  EXPECT_EQ(calls, 5);
  parallel_for(5, std::numeric_limits<int64_t>::max(), body);
  EXPECT_EQ(calls, 10);
  EXPECT_GE(available_cores(), 1);
}

}  // namespace
}  // namespace megatron
