#include "megatron/training/arguments/microbatches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using testing::HasSubstr;

std::string usage_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Microbatches, Constant) {
  const MicrobatchCalculator calculator(
      {.micro_batch_size = 2, .data_parallel_size = 4, .global_batch_size = 64});
  EXPECT_EQ(calculator.num_microbatches(0), 8);
  EXPECT_EQ(calculator.global_batch_size(1'000'000), 64);
  EXPECT_EQ(calculator.samples_of_iterations(10), 640);
  EXPECT_EQ(calculator.iterations_of_samples(700), 10);
}

TEST(Microbatches, RefusesWhatDoesNotDivide) {
  const MicrobatchCalculator::Options options{
      .micro_batch_size = 3, .data_parallel_size = 2, .global_batch_size = 16};
  EXPECT_THAT(usage_error([&] { MicrobatchCalculator calculator(options); }),
              HasSubstr("--global-batch-size 16 is not divisible by --micro-batch-size 3 times the "
                        "data-parallel size 2\n"
                        "hint: give a multiple of 6, or --decrease-batch-size-if-needed"));
}

TEST(Microbatches, DecreasesOnRequest) {
  const MicrobatchCalculator calculator({.micro_batch_size = 3,
                                         .data_parallel_size = 2,
                                         .global_batch_size = 16,
                                         .decrease_if_needed = true});
  EXPECT_EQ(calculator.global_batch_size(0), 12);
  EXPECT_EQ(calculator.num_microbatches(0), 2);
  EXPECT_THAT(usage_error([] {
                MicrobatchCalculator tiny({.micro_batch_size = 8,
                                           .data_parallel_size = 4,
                                           .global_batch_size = 16,
                                           .decrease_if_needed = true});
              }),
              HasSubstr("--global-batch-size 16 is not divisible"));
}

TEST(Microbatches, ScheduleParsesSuffixes) {
  const auto steps = parse_batch_size_schedule("0:8 1K:16 0.5M:32 2B:64 1T:128", 10);
  ASSERT_EQ(steps.size(), 5u);
  EXPECT_EQ(steps[1].threshold_samples, 100);
  EXPECT_EQ(steps[2].threshold_samples, 50'000);
  EXPECT_EQ(steps[3].threshold_samples, 200'000'000);
  EXPECT_EQ(steps[4].threshold_samples, 100'000'000'000);
  EXPECT_EQ(steps[4].global_batch_size, 128);
}

TEST(Microbatches, ScheduleGrows) {
  const MicrobatchCalculator calculator(
      {.micro_batch_size = 2, .schedule = parse_batch_size_schedule("0:4 100:8", 10)});
  EXPECT_EQ(calculator.global_batch_size(0), 4);
  EXPECT_EQ(calculator.global_batch_size(9), 4);
  EXPECT_EQ(calculator.global_batch_size(10), 8);
  // 4, 4, 4 samples bring the count to 12, past the threshold of 10.
  EXPECT_EQ(calculator.samples_of_iterations(3), 12);
  EXPECT_EQ(calculator.samples_of_iterations(5), 28);
  EXPECT_EQ(calculator.iterations_of_samples(28), 5);
  EXPECT_EQ(calculator.iterations_of_samples(27), 4);
  EXPECT_EQ(calculator.iterations_of_samples(7), 1);
}

TEST(Microbatches, ScheduleErrors) {
  const auto parse = [](const char* text) {
    return usage_error([&] {
      MicrobatchCalculator calculator(
          {.micro_batch_size = 1, .schedule = parse_batch_size_schedule(text, 10)});
    });
  };
  EXPECT_THAT(parse(""), HasSubstr("--step-batch-size-schedule is empty"));
  EXPECT_THAT(parse("8"), HasSubstr("\"8\" has no colon"));
  EXPECT_THAT(parse("x:8"), HasSubstr("the threshold of \"x:8\" is no number"));
  EXPECT_THAT(parse("0:-8"), HasSubstr("the batch size of \"0:-8\" is no positive integer"));
  EXPECT_THAT(parse("10:8"), HasSubstr("does not start at 0"));
  EXPECT_THAT(parse("0:8 100:16 50:32"), HasSubstr("thresholds do not ascend"));
  EXPECT_THAT(parse("0:8 100:4"), HasSubstr("the batch size shrinks from 8 to 4"));
}

}  // namespace
}  // namespace megatron
