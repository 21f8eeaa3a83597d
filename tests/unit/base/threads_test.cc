// Number of threads of a process, and how they wait.
#include "megatron/base/threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "tools/support/openmp_waiting.h"

namespace megatron {
namespace {

// Sets a variable, or removes it where the value is null, until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* const before = std::getenv(name);
    had_ = before != nullptr;
    if (had_) before_ = before;
    value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  ~Variable() { had_ ? ::setenv(name_, before_.c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  bool had_ = false;
  std::string before_;
};

TEST(NumThreads, TheFlagComesFirstThenTheEnvironmentThenTheCores) {
  {
    const Variable unset("OMP_NUM_THREADS", nullptr);
    EXPECT_EQ(choose_num_threads(3), 3);
    EXPECT_EQ(choose_num_threads(0), available_cores());
    EXPECT_EQ(choose_num_threads(0, 2), std::max(1, available_cores() / 2));
    EXPECT_EQ(choose_num_threads(0, 100000), 1);
  }
  const Variable set("OMP_NUM_THREADS", "7");
  EXPECT_EQ(choose_num_threads(3), 3);
  EXPECT_EQ(choose_num_threads(0), 7);
  EXPECT_EQ(choose_num_threads(0, 4), 7) << "the variable is a number for each process";
}

TEST(NumThreads, OnlyPositiveNumbersOfTheEnvironmentCount) {
  for (const auto& [text, expected] : {std::pair("5", 5),
                                       {"4,2", 4},
                                       {"", 0},
                                       {"many", 0},
                                       {"0", 0},
                                       {"-2", 0},
                                       {"999999999999999999999", 65536}}) {
    const Variable set("OMP_NUM_THREADS", text);
    EXPECT_EQ(omp_num_threads(), expected) << text;
    EXPECT_GE(choose_num_threads(0), 1) << text;
  }
}

TEST(OpenMpWaiting, ThreadsSleepWhereCoresAreShared) {
  const auto spins = [](int threads, int cores, std::vector<int> samples) {
    return spin_count(threads, cores, samples) > 0;
  };
  EXPECT_TRUE(spins(2, 2, {0, 0, 0, 0, 0}));
  EXPECT_FALSE(spins(2, 2, {1, 1, 1, 1, 1}));
  EXPECT_FALSE(spins(2, 2, {3, 3, 3, 3, 3}));
  EXPECT_TRUE(spins(1, 2, {1, 1, 1, 1, 1})) << "one core is left";
  EXPECT_TRUE(spins(2, 2, {0, 3, 0, 2, 0}))
      << "the median counts: something always runs for a moment";
  EXPECT_FALSE(spins(2, 2, {2, 0, 2, 2, 0}));
  EXPECT_TRUE(spins(2, 2, {})) << "nothing is known";
}

TEST(OpenMpWaiting, WhatTheUserSetStays) {
  {
    const Variable policy("OMP_WAIT_POLICY", "active");
    const Variable count("GOMP_SPINCOUNT", nullptr);
    set_openmp_waiting();
    EXPECT_EQ(std::getenv("GOMP_SPINCOUNT"), nullptr);
  }
  const Variable policy("OMP_WAIT_POLICY", nullptr);
  {
    const Variable count("GOMP_SPINCOUNT", "123");
    set_openmp_waiting();
    EXPECT_STREQ(std::getenv("GOMP_SPINCOUNT"), "123");
  }
  const Variable count("GOMP_SPINCOUNT", nullptr);
  set_openmp_waiting();
  ASSERT_NE(std::getenv("GOMP_SPINCOUNT"), nullptr);
}

}  // namespace
}  // namespace megatron
