#include "megatron/reporting/prometheus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

using testing::HasSubstr;

std::filesystem::path file_in_fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder / "run.prom";
}

TEST(Prometheus, GaugesFollowTheRecords) {
  const auto path = file_in_fresh_folder("prometheus");
  PrometheusSink sink(path);
  EXPECT_THAT(read_file(path), HasSubstr("# TYPE megatron_up gauge\nmegatron_up 1\n"));
  MetricsRecord start("start");
  start.member("iteration", 4)
      .member("task", "gpt")
      .member("device", "a \"b\\c\"\nd")
      .member("dtype", "bf16");
  sink.record(start);
  MetricsRecord train("train");
  train.member("iteration", 5)
      .member("lm loss", std::nan(""))
      .member("rewards margin", 0.5)
      .member("mfu", 0.25);
  train.member("grad_norm", std::numeric_limits<double>::infinity());
  sink.record(train);
  MetricsRecord evaluation("evaluation");
  evaluation.member("iteration", 5)
      .member("split", "validation")
      .member("set", "books")
      .member("lm loss", 2.5)
      .member("ppl", 12.0);
  sink.record(evaluation);
  MetricsRecord checkpoint("checkpoint");
  checkpoint.member("iteration", 5)
      .member("bytes", 1000)
      .member("seconds", 0.5)
      .member("directory", "/r");
  sink.record(checkpoint);
  MetricsRecord sections("sections");
  sections.member("iteration", 5)
      .member("forward_seconds", 0.5)
      .member("forward_max_seconds", 0.75)
      .member("forward_max_rank", 3);
  sink.record(sections);
  sink.close();
  const std::string text = read_file(path);
  EXPECT_EQ(text, sink.text());
  for (const char* line :
       {"megatron_up 0\n", "megatron_start_iteration 4\n", "megatron_iteration 5\n",
        "megatron_loss{name=\"lm loss\"} NaN\n",
        "megatron_task_metric{name=\"rewards margin\"} 0.5\n", "megatron_gradient_norm +Inf\n",
        "megatron_model_flops_utilization_ratio 0.25\n", "device=\"a \\\"b\\\\c\\\"\\nd\"",
        "megatron_evaluation_loss{split=\"validation\",set=\"books\"} 2.5\n",
        "megatron_section_seconds{section=\"forward\"} 0.5\n",
        "megatron_section_max_seconds{section=\"forward\"} 0.75\n",
        "megatron_section_max_rank{section=\"forward\"} 3\n",
        "megatron_checkpoint_size_bytes 1000\n", "megatron_checkpoint_timestamp_seconds ",
        "# HELP megatron_checkpoint_iteration "})
    EXPECT_THAT(text, HasSubstr(line));
}

TEST(Prometheus, AFolderThatIsMissingIsNamedAtTheStart) {
  try {
    PrometheusSink sink("/proc/nowhere/x.prom");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/proc/nowhere/x.prom"));
  }
}

}  // namespace
}  // namespace megatron
