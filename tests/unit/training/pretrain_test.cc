// The loop with a task of its own: what it does when losses are not finite, and what it gives the task.
#include "megatron/training/pretrain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

using testing::HasSubstr;

Arguments tiny(const std::string& run_dir) {
  Arguments a;
  a.transformer.num_layers = 1;
  a.transformer.hidden_size = 16;
  a.transformer.num_attention_heads = 2;
  a.transformer.seq_length = 8;
  a.tokenizer.tokenizer_type = "ByteLevelTokenizer";
  a.data.mock_data = true;
  a.data.num_workers = 0;
  a.optimizer.lr = 1e-3;
  a.training.micro_batch_size = 2;
  a.training.train_iters = 6;
  a.training.eval_iters = 0;
  a.training.log_interval = 1;
  a.training.device = DeviceChoice::kCpu;
  a.training.num_threads = 1;
  a.training.exit_signal_handler = false;
  a.training.run_dir = (std::filesystem::path(testing::TempDir()) / run_dir).string();
  std::filesystem::remove_all(a.training.run_dir);
  a.finalize();
  return a;
}

// The GPT task whose loss is not finite for the samples in [first, last).
PretrainTask broken_task(int64_t first, int64_t last) {
  PretrainTask task = gpt_task();
  const auto forward = task.forward_step;
  task.forward_step = [=](Module& model, const Batch& batch, const at::Tensor& input, const ForwardContext& context) {
    StageOutput output = forward(model, batch, input, context);
    const int64_t ordinal = batch.place.sample[0].item<int64_t>();
    if (ordinal >= first && ordinal < last)
      output.loss.sum = output.loss.sum * std::numeric_limits<double>::quiet_NaN();
    return output;
  };
  return task;
}

std::vector<nlohmann::json> train_records(const Arguments& arguments) {
  std::vector<nlohmann::json> out;
  std::ifstream file(std::filesystem::path(arguments.training.run_dir) / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (auto record = nlohmann::json::parse(line); record["type"] == "train") out.push_back(record);
  return out;
}

TEST(Pretrain, ABadStepIsSkippedAndCounted) {
  const Arguments arguments = tiny("pretrain_bad_step");
  testing::internal::CaptureStdout();
  EXPECT_EQ(pretrain(broken_task(4, 6), arguments), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("number of skipped iterations:   1 | number of nan iterations:   1 |"));
  const auto records = train_records(arguments);
  ASSERT_EQ(records.size(), 6u);
  EXPECT_EQ(records[2]["skipped_iterations"], 1);
  EXPECT_FALSE(records[2].contains("grad_norm"));
  EXPECT_EQ(records[3]["skipped_iterations"], 0);
  // The samples of a skipped step are consumed; the schedule does not advance.
  EXPECT_EQ(records[3]["consumed_samples"], 8);
  EXPECT_EQ(records[2]["learning_rate"], records[1]["learning_rate"]);
}

TEST(Pretrain, StopsAfterBadStepsInARow) {
  Arguments arguments = tiny("pretrain_stop");
  arguments.optimizer.max_consecutive_bad_steps = 3;
  testing::internal::CaptureStdout();
  std::string message;
  try {
    pretrain(broken_task(4, 100), arguments);
  } catch (const Error& error) {
    message = error.what();
  }
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(message, HasSubstr("iteration 5: loss or gradient was not finite for 3 iterations in a row"));
  EXPECT_THAT(message, HasSubstr("--max-consecutive-bad-steps"));
}

TEST(Pretrain, MicroBatchesComeInOrder) {
  Arguments arguments = tiny("pretrain_order");
  arguments.training.global_batch_size = 6;
  arguments.training.train_iters = 2;
  PretrainTask task = gpt_task();
  std::vector<int64_t> seen;
  const auto forward = task.forward_step;
  task.forward_step = [&](Module& model, const Batch& batch, const at::Tensor& input, const ForwardContext& context) {
    EXPECT_TRUE(context.training);
    for (int64_t i = 0; i < batch.place.sample.numel(); ++i) seen.push_back(batch.place.sample[i].item<int64_t>());
    return forward(model, batch, input, context);
  };
  testing::internal::CaptureStdout();
  pretrain(task, arguments);
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(seen, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(Pretrain, UnknownTask) {
  try {
    find_task("gtp");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("--task gtp is unknown\nhint: known tasks: gpt"));
  }
  EXPECT_EQ(find_task("gpt").name, "gpt");
}

}  // namespace
}  // namespace megatron
