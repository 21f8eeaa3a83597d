#include "megatron/training/training_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/reporting/metrics_file.h"
#include "megatron/reporting/section_means.h"
#include "megatron/training/metrics_sinks.h"

namespace megatron {
namespace {

using nlohmann::json;

std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(folder);
  return folder;
}

std::vector<json> read_metrics(const std::filesystem::path& folder) {
  std::vector<json> records;
  std::ifstream file(folder / kMetricsName);
  for (std::string line; std::getline(file, line);) records.push_back(json::parse(line));
  return records;
}

MetricsQueue sinks_in(TrainingConfig config, const std::filesystem::path& folder) {
  config.run_dir = folder.string();
  return MetricsQueue(open_sinks({config, "{}"}));
}

RunFacts facts() {
  RunFacts out;
  out.train_iters = 20;
  out.sequence_length = 8;
  out.flops_per_token = 1e6;
  out.peak_flops = 1e12;
  return out;
}

StepRecord step(int64_t iteration, double loss) {
  StepRecord out;
  out.iteration = iteration;
  out.consumed_samples = 4 * iteration;
  out.global_batch_size = 4;
  out.loss = loss;
  out.learning_rate = 1e-3;
  out.grad_norm = 2;
  return out;
}

TEST(TrainingLog, AveragesTheMetricsOfTheTask) {
  TrainingConfig config;
  config.log_interval = 2;
  const auto folder = fresh_folder("log_metrics");
  RunFacts of_task = facts();
  of_task.loss_name = "dpo loss";
  of_task.loss_per_token = false;
  testing::internal::CaptureStdout();
  {
    TrainingLog log(config, of_task, sinks_in(config, folder));
    log.resume();
    for (int i = 1; i <= 2; ++i) {
      StepRecord record = step(i, 1.0 * i);
      record.metrics = {{"rewards margin", 10.0 * i}};
      log.step(record);
    }
    EvaluationRecord evaluation;
    evaluation.loss = 0.5;
    evaluation.metrics = {{"rewards margin", 7.0}};
    log.evaluation(evaluation);
    log.close();
  }
  testing::internal::GetCapturedStdout();
  const std::vector<json> records = read_metrics(folder);
  EXPECT_EQ(records.at(0)["rewards margin"], 10.0) << "the first line";
  EXPECT_EQ(records.at(1)["rewards margin"], 15.0) << "the mean of two steps";
  EXPECT_EQ(records.at(1)["dpo loss"], 1.5);
  EXPECT_EQ(records.back()["rewards margin"], 7.0);
  EXPECT_FALSE(records.back().contains("ppl"));
}

TEST(TrainingLog, AveragesOverTheIntervalAndKeepsTheFirstLine) {
  TrainingConfig config;
  config.log_interval = 4;
  config.log_throughput = true;
  const auto folder = fresh_folder("training_log_averages");
  testing::internal::CaptureStdout();
  {
    TrainingLog log(config, facts(), sinks_in(config, folder));
    std::vector<bool> printed;
    for (int i = 1; i <= 8; ++i) {
      StepRecord record = step(i, i);
      record.skipped = i == 6;
      record.non_finite = i == 6;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      printed.push_back(log.step(record));
    }
    EXPECT_EQ(printed, (std::vector<bool>{true, false, false, true, false, false, false, true}));
  }
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_THAT(out,
              testing::HasSubstr("iteration        8/      20 | consumed samples:           32 |"));
  EXPECT_THAT(out,
              testing::ContainsRegex("iteration        1/.* tokens per second: [0-9.]+ \\|\n"));
  EXPECT_THAT(out, testing::ContainsRegex(
                       "iteration        8/.* tokens per second: [0-9.]+ \\| ETA: 0:0[0-9] \\|\n"));
  EXPECT_THAT(out, testing::HasSubstr("throughput per GPU (TFLOP/s/GPU): "));
  const std::vector<json> records = read_metrics(folder);
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0]["lm loss"], 1.0);
  EXPECT_EQ(records[1]["lm loss"], 2.5);
  EXPECT_EQ(records[2]["lm loss"], 20.0 / 3);
  EXPECT_EQ(records[2]["skipped_iterations"], 1);
  EXPECT_EQ(records[2]["nan_iterations"], 1);
  EXPECT_EQ(records[1]["skipped_iterations"], 0);
  EXPECT_EQ(records[2]["consumed_tokens"], 256);
  EXPECT_GT(records[2]["mfu"].get<double>(), 0.0);
  EXPECT_GE(records[2]["seconds_per_iteration"].get<double>(), 0.001);
}

TEST(TrainingLog, PausedTimeDoesNotCount) {
  TrainingConfig config;
  config.log_interval = 1;
  const auto folder = fresh_folder("training_log_pause");
  testing::internal::CaptureStdout();
  TrainingLog log(config, facts(), sinks_in(config, folder));
  log.pause();
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  log.resume();
  log.step(step(1, 1));
  log.close();
  testing::internal::GetCapturedStdout();
  EXPECT_LT(read_metrics(folder)[0]["seconds_per_iteration"].get<double>(), 0.05);
}

TEST(TrainingLog, EvaluationLinesAndRecords) {
  TrainingConfig config;
  config.tensorboard_dir = fresh_folder("training_log_tb").string();
  config.log_validation_ppl_to_tensorboard = true;
  const auto folder = fresh_folder("training_log_eval");
  testing::internal::CaptureStdout();
  {
    TrainingLog log(config, facts(), sinks_in(config, folder));
    EvaluationRecord record;
    record.iteration = 10;
    record.where = "iteration 10";
    record.loss = 2;
    log.pause();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    log.evaluation(record);
    record.set_index = 1;
    record.set_name = "books";
    log.evaluation(record);
    record.set_is_named = record.at_end = true;
    log.evaluation(record);
    StepRecord one = step(1, 1);
    one.num_zeros = 3;
    one.params_norm = 4;
    log.step(one);
    log.memory({{.reserved = 1 << 20, .allocated = 1 << 19, .resident = 1 << 21}}, 1);
    log.memory({{.reserved = 3 << 20, .resident = 1 << 20},
                {.reserved = 1 << 20, .allocated = 1 << 20, .resident = 5 << 20}},
               2);
  }
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_THAT(
      out, testing::HasSubstr(" validation loss at iteration 10 | lm loss value: 2.000000E+00 |"));
  EXPECT_THAT(out, testing::HasSubstr(" validation-1 loss at iteration 10 | "));
  EXPECT_THAT(out, testing::HasSubstr(
                       "memory (MB) | allocated: 0.50 | max allocated: 0.00 | reserved: 1.00"));
  EXPECT_THAT(out, testing::HasSubstr(
                       "[iteration 2] memory (MB), most of 2 ranks | allocated: 1.00 (rank 1) | "
                       "max allocated: 0.00 "
                       "(rank 0) | reserved: 3.00 (rank 0) | resident on the host: 5.00 (rank 1)"));
  const std::vector<json> records = read_metrics(folder);
  EXPECT_THAT(out, testing::HasSubstr(" validation-books loss at iteration 10 | "));
  EXPECT_GE(records[0]["seconds"].get<double>(), 0.02);
  EXPECT_EQ(records[1]["set"], "books");
  EXPECT_FALSE(records[1].contains("at_end"));
  EXPECT_EQ(records[2]["at_end"], true);
  EXPECT_EQ(records[0]["split"], "validation");
  std::string events;
  for (const auto& entry : std::filesystem::directory_iterator(config.tensorboard_dir))
    events += read_file(entry.path());
  for (const char* tag : {"lm loss validation", "lm loss validation-1 ppl vs samples",
                          "lm loss validation-books", "learning-rate", "grad-norm vs samples",
                          "num-zeros", "params-norm", "batch-size", "loss-scale"})
    EXPECT_THAT(events, testing::HasSubstr(tag));
}

TEST(TrainingLog, TimersAreReported) {
  TrainingConfig config;
  config.timing_log_option = TimingLogOption::kMax;
  Timers timers(1);
  {
    ScopedTimer timer(timers, "optimizer", 1);
  }
  testing::internal::CaptureStdout();
  {
    TrainingLog log(config, facts());
    log.timers(timers_from_texts({timers_to_text(timers), "optimizer\t30\n"}), 10, 10);
  }
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              testing::HasSubstr("    optimizer ......................................: 3.00"));
}

TEST(TrainingLog, SectionsOfAllRanksGoToTheSinks) {
  TrainingConfig config;
  config.tensorboard_dir = fresh_folder("training_log_sections_tb").string();
  config.log_timers_to_tensorboard = true;
  const auto folder = fresh_folder("training_log_sections");
  config.prometheus_textfile = (folder / "run.prom").string();
  std::filesystem::create_directories(folder);
  SectionMeans means;
  means.add(0, {1, 10, 20, 5, 2, 1});
  means.add(1, {1, 30, 20, 1, 2, 1});
  {
    TrainingLog log(config, facts(), sinks_in(config, folder));
    log.sections(*means.take(), 4);
  }
  const std::vector<json> records = read_metrics(folder);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0]["type"], "sections");
  EXPECT_EQ(records[0]["iteration"], 4);
  EXPECT_EQ(records[0]["forward_seconds"], 0.020);
  EXPECT_EQ(records[0]["forward_max_seconds"], 0.030);
  EXPECT_EQ(records[0]["forward_max_rank"], 1);
  EXPECT_EQ(records[0]["communication_max_rank"], 0);
  for (const char* section : {"data", "forward", "backward", "communication", "optimizer", "host"})
    EXPECT_TRUE(records[0].contains(cat(section, "_seconds"))) << section;
  EXPECT_THAT(read_file(config.prometheus_textfile),
              testing::HasSubstr("megatron_section_max_seconds{section=\"forward\"} 0.03\n"));
  std::string events;
  for (const auto& entry : std::filesystem::directory_iterator(config.tensorboard_dir))
    events += read_file(entry.path());
  for (const char* tag :
       {"section-forward-time", "section-forward-max-time", "section-communication-max-rank"})
    EXPECT_THAT(events, testing::HasSubstr(tag));
}

TEST(MetricsFile, EndsALineThatAKilledWriterLeft) {
  const auto folder = fresh_folder("metrics_file");
  std::filesystem::create_directories(folder);
  std::ofstream(folder / kMetricsName) << "{\"type\":\"tr";
  {
    MetricsFile file(folder);
    file.record(MetricsRecord("end"));
  }
  const std::string text = read_file(folder / kMetricsName);
  EXPECT_THAT(text, testing::StartsWith("{\"type\":\"tr\n{\"type\": \"end\", \"time\": "));
}

TEST(MetricsFile, NamesTheFolderItCannotWrite) {
  try {
    MetricsFile file("/proc/nowhere");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("/proc/nowhere cannot be created"));
  }
}

}  // namespace
}  // namespace megatron
