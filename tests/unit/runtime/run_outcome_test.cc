#include "megatron/runtime/run_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "megatron/base/files.h"
#include "megatron/base/process.h"
#include "megatron/base/process_signals.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

class RunOutcomeTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / cat("run_outcome_", ::getpid());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  nlohmann::json outcome() {
    const std::string text = read_file(folder_ / kOutcomeName);
    // One member per line: what a script with sed relies on.
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
      EXPECT_TRUE(std::regex_match(line, std::regex(R"(\{|\}|  "[a-z_]+": .*)"))) << line;
    return nlohmann::json::parse(text);
  }

  fs::path folder_;
};

TEST_F(RunOutcomeTest, SaysRunningUntilTheEnd) {
  RunOutcome run(folder_, 0, 2);
  EXPECT_FALSE(fs::exists(folder_));
  run.begin();
  nlohmann::json json = outcome();
  EXPECT_EQ(json["outcome"], "running");
  EXPECT_EQ(json["pid"], ::getpid());
  EXPECT_EQ(json["process_start"], process_start(::getpid()));
  EXPECT_EQ(json["host"], host_name());
  EXPECT_EQ(json["attempt"], 1);
  EXPECT_EQ(json["restart_count"], 2);
  EXPECT_TRUE(json["exit_code"].is_null());
  EXPECT_TRUE(json["last_saved_iteration"].is_null());
  run.set_iteration(12);
  run.set_saved(10, "x/iter_0000010", 1.5);
  run.end(RunEnd::kStopped, 85, "stopped by signal 15");
  json = outcome();
  EXPECT_EQ(json["outcome"], "stopped");
  EXPECT_EQ(json["class"], "stopped");
  EXPECT_EQ(json["exit_code"], 85);
  EXPECT_EQ(json["reason"], "stopped by signal 15");
  EXPECT_EQ(json["iteration"], 12);
  EXPECT_EQ(json["last_saved_iteration"], 10);
  EXPECT_EQ(json["last_saved_directory"], "x/iter_0000010");
  EXPECT_EQ(json["seconds_per_save"], 1.5);
  EXPECT_GE(json["time"], json["started"]);
}

TEST_F(RunOutcomeTest, AFailureNamesClassRankAndReason) {
  RunOutcome run(folder_, 0, 0);
  run.begin();
  run.fail(FailureClass::kRetry, 3, "rank 3 is gone\ndetail: \"x\"");
  run.end(RunEnd::kFinished, 0, "too late");
  const nlohmann::json json = outcome();
  EXPECT_EQ(json["outcome"], "failed");
  EXPECT_EQ(json["class"], "retry");
  EXPECT_EQ(json["exit_code"], 75);
  EXPECT_EQ(json["failed_rank"], 3);
  EXPECT_EQ(json["reason"], "rank 3 is gone\ndetail: \"x\"");
}

TEST_F(RunOutcomeTest, AttemptsAreCountedAndTheTimeOfASaveIsKept) {
  for (int attempt = 1; attempt <= 3; ++attempt) {
    RunOutcome run(folder_, 0, 0);
    EXPECT_EQ(run.previous().attempt, attempt - 1);
    EXPECT_EQ(run.previous().seconds_per_save, attempt > 1 ? 2.5 : 0);
    run.begin();
    run.set_saved(attempt, "d", attempt == 1 ? 2.5 : 0.5);
    run.end(RunEnd::kFinished, 0, "finished");
    EXPECT_EQ(outcome()["attempt"], attempt);
  }
  write_file_atomically(folder_ / kOutcomeName, "{");
  EXPECT_EQ(read_previous_outcome(folder_).attempt, 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(RunOutcomeTest, ACrashIsAnOutcome) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::freopen("/dev/null", "w", stderr) == nullptr) ::_exit(1);
    install_crash_handler();
    set_crash_hook(write_outcome_of_signal);
    auto* run = new RunOutcome(folder_, 0, 0);
    run->begin();
    run->set_iteration(7);
    run->set_saved(5, "x/iter_0000005", 0);
    ::raise(SIGSEGV);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  const nlohmann::json json = outcome();
  EXPECT_EQ(json["outcome"], "failed");
  EXPECT_EQ(json["class"], "retry");
  EXPECT_EQ(json["exit_code"], 128 + SIGSEGV);
  EXPECT_EQ(json["iteration"], 7);
  EXPECT_EQ(json["last_saved_iteration"], 5);
  EXPECT_EQ(json["failed_rank"], 0);
  EXPECT_EQ(json["pid"], child);
  EXPECT_THAT(std::string(json["reason"]), testing::HasSubstr("signal 11 (SIGSEGV)"));
}
#endif

TEST_F(RunOutcomeTest, AnotherRankWritesForAFirstRankThatIsLost) {
  RunOutcome first(folder_, 0, 0);
  first.begin();
  RunOutcome second(folder_, 1, 0);
  second.follow(first.attempt());
  second.fail(FailureClass::kRetry, 0, "rank 0 is gone");
  EXPECT_EQ(outcome()["reason"], "rank 0 is gone");
  EXPECT_EQ(outcome()["rank"], 1);
  EXPECT_EQ(outcome()["attempt"], 1);

  // What the first rank could still say counts, and so does another attempt.
  RunOutcome again(folder_, 0, 0);
  again.begin();
  RunOutcome late(folder_, 1, 0);
  late.follow(1);
  late.fail(FailureClass::kRetry, 0, "x");
  EXPECT_EQ(outcome()["outcome"], "running");
  RunOutcome third(folder_, 1, 0);
  third.follow(again.attempt());
  again.fail(FailureClass::kDoNotRetry, 0, "the data ended");
  third.fail(FailureClass::kRetry, 0, "rank 0 is gone");
  EXPECT_EQ(outcome()["reason"], "the data ended");
}

TEST_F(RunOutcomeTest, NoSignalWritesAfterTheEnd) {
  {
    RunOutcome run(folder_, 0, 0);
    run.begin();
    run.end(RunEnd::kFinished, 0, "finished");
    write_outcome_of_signal(SIGSEGV);
  }
  write_outcome_of_signal(SIGSEGV);
  EXPECT_EQ(outcome()["outcome"], "finished");
}

}  // namespace
}  // namespace megatron
