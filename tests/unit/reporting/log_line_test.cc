#include "megatron/reporting/log_line.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>

namespace megatron {
namespace {

TrainingLine example() {
  setenv("TZ", "UTC", 1);
  tzset();
  TrainingLine line;
  line.time =
      std::chrono::system_clock::time_point(std::chrono::microseconds(1'700'000'000'012'345));
  line.iteration = 100;
  line.train_iters = 5000;
  line.consumed_samples = 25600;
  line.ms_per_iteration = 1234.56;
  line.learning_rate = 1.5e-4;
  line.global_batch_size = 256;
  line.losses = {{"lm loss", 7.25}};
  line.loss_scale = 1;
  line.grad_norm = 0.98765;
  return line;
}

TEST(LogLine, TrainingDefault) {
  EXPECT_EQ(
      format_training_line(example()),
      " [2023-11-14 22:13:20.012345] iteration      100/    5000 | consumed samples:        25600 |"
      " elapsed time per iteration (ms): 1234.6 | learning rate: 1.500000E-04 | global batch size: "
      "  256 |"
      " lm loss: 7.250000E+00 | loss scale: 1.0 | grad norm: 0.988 | number of skipped iterations: "
      "  0 |"
      " number of nan iterations:   0 |");
}

TEST(LogLine, TrainingWithEverything) {
  TrainingLine line = example();
  line.skipped_samples = 512;
  line.tflops_per_gpu = 412.34;
  line.losses.push_back({"z loss", -1.0});
  line.losses.push_back({"mtp_1 loss", 8.0});
  line.loss_scale = 65536;
  line.num_zeros = 12;
  line.params_norm = 100.12345;
  line.skipped_iterations = 2;
  line.nan_iterations = 1;
  line.per_second = {{"images", 12.5}};
  EXPECT_EQ(
      format_training_line(line),
      " [2023-11-14 22:13:20.012345] iteration      100/    5000 | consumed samples:        25600 |"
      " skipped samples:          512 | elapsed time per iteration (ms): 1234.6 |"
      " throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 1.500000E-04 | global batch size: "
      "  256 |"
      " lm loss: 7.250000E+00 | mtp_1 loss: 8.000000E+00 | loss scale: 65536.0 | grad norm: 0.988 |"
      " num zeros: 12 | params norm: 100.123 | number of skipped iterations:   2 |"
      " number of nan iterations:   1 | images per second: 12.5 |");
}

TEST(LogLine, OursComesAfterMegatrons) {
  TrainingLine line = example();
  const std::string theirs = format_training_line(line);
  line.tokens_per_second = 123456.78;
  line.seconds_left = 3723;
  EXPECT_EQ(format_training_line(line), theirs + " tokens per second: 123456.8 | ETA: 1:02:03 |");
}

TEST(LogLine, MetricsOfTheTaskFollowTheLoss) {
  TrainingLine line = example();
  line.losses = {{"dpo loss", 0.5}};
  line.metrics = {{"rewards margin", -0.25}, {"rewards accuracy", 0.75}};
  EXPECT_NE(format_training_line(line).find(
                " dpo loss: 5.000000E-01 | rewards margin: -2.500000E-01 | rewards accuracy:"
                " 7.500000E-01 | loss scale: 1.0 |"),
            std::string::npos);
  EvaluationLine evaluation{
      "", "iteration 1", {{"dpo loss", 0.5}}, {{"rewards margin", 2.0}}, /*perplexity=*/false};
  const std::string text =
      " validation loss at iteration 1 | dpo loss value: 5.000000E-01 | rewards margin value: "
      "2.000000E+00 | ";
  EXPECT_NE(format_evaluation_lines(evaluation).find(text + "\n"), std::string::npos);
}

TEST(LogLine, SkippedStepHasNoNorm) {
  TrainingLine line = example();
  line.grad_norm.reset();
  EXPECT_EQ(format_training_line(line).find("grad norm"), std::string::npos);
}

TEST(LogLine, Evaluation) {
  const std::string text =
      " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 "
      "| ";
  const std::string dashes(text.size() + 1, '-');
  EXPECT_EQ(format_evaluation_lines({"", "iteration 100", {{"lm loss", 2.0}}}),
            dashes + "\n" + text + "\n" + dashes);
  EXPECT_NE(
      format_evaluation_lines({"-1", "iteration 7 on validation set", {{"lm loss", 30.0}}})
          .find(
              " validation-1 loss at iteration 7 on validation set | lm loss value: 3.000000E+01 |"
              " lm loss PPL: 4.851652E+08 | "),
      std::string::npos);
}

}  // namespace
}  // namespace megatron
