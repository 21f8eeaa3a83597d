// The end of a run within a time limit: --exit-duration-in-mins and the grace period after a
// signal, with a slow disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/tasks/tasks.h"

namespace {
std::atomic<int> seconds_tenths_per_sync{0};
}

// In place of the C library's: a disk that takes its time with tensor files.
extern "C" int fsync(int fd) {
  char path[4096] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), path, sizeof path - 1) > 0 &&
      std::string_view(path).ends_with(".safetensors"))
    std::this_thread::sleep_for(std::chrono::milliseconds(100 * seconds_tenths_per_sync));
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace megatron {
namespace {

using testing::HasSubstr;

class EndingTest : public testing::Test {
 protected:
  void SetUp() override {
    save_ = std::filesystem::path(testing::TempDir()) / cat("ending_", ::getpid());
    std::filesystem::remove_all(save_);
    a_.transformer.num_layers = 1;
    a_.transformer.hidden_size = 16;
    a_.transformer.num_attention_heads = 2;
    a_.transformer.seq_length = 8;
    a_.tokenizer.tokenizer_type = "ByteLevelTokenizer";
    a_.data.mock_data = true;
    a_.data.num_workers = 0;
    a_.optimizer.lr = 1e-3;
    a_.training.micro_batch_size = 2;
    a_.training.train_iters = 100000;
    a_.training.eval_iters = 0;
    a_.training.log_interval = 1000;
    a_.training.device = DeviceChoice::kCpu;
    a_.training.num_threads = 1;
    a_.training.exit_signal_handler = false;
    a_.training.save = save_.string();
    a_.finalize();
    seconds_tenths_per_sync = 6;
  }
  void TearDown() override {
    seconds_tenths_per_sync = 0;
    std::filesystem::remove_all(save_);
  }

  // Trains with `left` seconds of one minute left, and returns how many of them were used.
  double train(double left) {
    Job job;
    const auto now = std::chrono::steady_clock::now();
    job.started = now - std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                            std::chrono::duration<double>(60 - left));
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = pretrain(gpt_task(), a_, job);
    log_ = testing::internal::GetCapturedStderr();
    testing::internal::GetCapturedStdout();
    EXPECT_EQ(code, a_.training.stopped_exit_code.value_or(0));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - now).count();
  }
  void write_outcome(double seconds_per_save) {
    std::filesystem::create_directories(save_);
    write_file_atomically(save_ / "outcome.json",
                          cat(R"({"attempt": 1, "seconds_per_save": )", seconds_per_save, "}"));
  }
  nlohmann::json outcome() { return nlohmann::json::parse(read_file(save_ / "outcome.json")); }

  Arguments a_;
  std::filesystem::path save_;
  std::string log_;
};

TEST_F(EndingTest, TheLastSaveOfASlowDiskEndsWithinTheDuration) {
  a_.training.save_interval = 100;
  a_.training.exit_duration_in_mins = 1;
  a_.training.exit_signal_grace_seconds = 1;
  a_.training.stopped_exit_code = 85;
  EXPECT_LT(train(4), 4);
  const nlohmann::json json = outcome();
  EXPECT_EQ(json["outcome"], "stopped");
  EXPECT_EQ(json["exit_code"], 85);
  EXPECT_EQ(json["reason"], "stopped by --exit-duration-in-mins 1");
  EXPECT_GE(json["seconds_per_save"], 0.6);
  const auto checkpoints = find_checkpoints(save_);
  ASSERT_GE(checkpoints.size(), 2u);
  EXPECT_EQ(checkpoints[0].iteration, json["iteration"]);
  EXPECT_EQ(json["last_saved_directory"], checkpoints[0].directory.string());
  // A step with its save takes 0.6 s, and the one after it another 0.6 s.
  EXPECT_THAT(log_,
              HasSubstr("but the run is killed 1 s after a signal (--exit-signal-grace-seconds)"));
  EXPECT_EQ(log_.find("is killed"), log_.rfind("is killed")) << "said more than once";
}

TEST_F(EndingTest, ThePreviousAttemptsSavesCountBeforeTheFirstOne) {
  a_.training.exit_duration_in_mins = 1;
  write_outcome(100);
  // A save of 100 s fits into no minute: one step, and the end.
  seconds_tenths_per_sync = 0;
  train(60);
  EXPECT_EQ(outcome()["iteration"], 1);
  EXPECT_EQ(outcome()["seconds_per_save"], 100);
  EXPECT_EQ(log_.find("is killed"), std::string::npos) << "without torchrun nobody said when";
}

TEST(OwnErrors, DevicesAndConnectionsMayDoBetterInAnotherStart) {
  const auto thrown = [](const std::function<void()>& work) {
    try {
      with_own_errors([&] {
        work();
        return 0;
      });
    } catch (const std::exception& error) {
      return failure_class(error);
    }
    return FailureClass::kInternal;
  };
  EXPECT_EQ(
      thrown([] { TORCH_CHECK(false, "CUDA error: an illegal memory access was encountered"); }),
      FailureClass::kRetry);
  EXPECT_EQ(thrown([] { TORCH_CHECK_WITH(DistNetworkError, false, "connection reset"); }),
            FailureClass::kRetry);
  EXPECT_EQ(thrown([] { TORCH_CHECK(false, "CUDA out of memory. Tried to allocate 2.00 GiB"); }),
            FailureClass::kDoNotRetry);
  EXPECT_EQ(thrown([] { TORCH_CHECK(false, "sizes differ"); }), FailureClass::kDoNotRetry);
  EXPECT_EQ(thrown([] { throw UsageError("x"); }), FailureClass::kUsage);
}

}  // namespace
}  // namespace megatron
