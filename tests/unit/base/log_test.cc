#include "megatron/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/progress.h"
#include "tests/unit/base/capture.h"

namespace megatron {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

// Makes standard error a terminal of a given width and collects what is written to it.
class Terminal {
 public:
  explicit Terminal(unsigned short columns) {
    winsize size{};
    size.ws_col = columns;
    size.ws_row = 24;
    if (::openpty(&master_, &slave_, nullptr, nullptr, &size) != 0)
      throw Error("no pseudo-terminal");
    saved_ = ::dup(STDERR_FILENO);
    ::dup2(slave_, STDERR_FILENO);
    ::setenv("TERM", "xterm", 1);
    reader_ = std::thread([this] {
      char buffer[4096];
      while (!stop_) {
        pollfd ready{master_, POLLIN, 0};
        if (::poll(&ready, 1, 20) <= 0) continue;
        const ssize_t got = ::read(master_, buffer, sizeof buffer);
        if (got <= 0) break;
        text_.append(buffer, static_cast<size_t>(got));
      }
    });
  }
  ~Terminal() { finish(); }
  std::string finish() {
    if (saved_ < 0) return text_;
    ::dup2(saved_, STDERR_FILENO);
    ::close(saved_);
    saved_ = -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stop_ = true;
    reader_.join();
    ::close(slave_);
    ::close(master_);
    return text_;
  }

 private:
  int master_ = -1, slave_ = -1, saved_ = -1;
  std::string text_;
  std::atomic<bool> stop_{false};
  std::thread reader_;
};

TEST(Log, LinesHaveLevelsAndAPrefix) {
  Capture err(STDERR_FILENO);
  log_info("one");
  log_warning("two");
  log_error("three");
  set_log_prefix("[rank 3] ");
  log_info("four");
  set_log_prefix("");
  EXPECT_EQ(err.finish(), "one\nwarning: two\nerror: three\n[rank 3] four\n");
}

TEST(Log, ResultsGoToStandardOutput) {
  Capture out(STDOUT_FILENO);
  print_line("a result");
  EXPECT_EQ(out.finish(), "a result\n");
}

TEST(Log, NoStatusLineWithoutATerminal) {
  Capture err(STDERR_FILENO);
  EXPECT_FALSE(is_terminal());
  set_status_line("step 3");
  log_info("x");
  set_status_line("");
  EXPECT_EQ(err.finish(), "x\n");
}

TEST(Log, TheStatusLineStaysBelowTheLog) {
  Terminal terminal(20);
  EXPECT_TRUE(is_terminal());
  set_status_line("caf\xc3\xa9 \x1b[31mstep\n3 of many many");
  log_info("a line");
  set_status_line("");
  log_info("last");
  const std::string text = terminal.finish();
  const std::string status = "caf\xc3\xa9  [31mstep 3 of";  // 19 characters, controls as blanks
  EXPECT_EQ(text, "\r\x1b[K" + status + "\r\x1b[Ka line\r\n" + status + "\r\x1b[Klast\r\n");
}

TEST(Log, ADumbTerminalHasNoStatusLine) {
  Terminal terminal(80);
  ::setenv("TERM", "dumb", 1);
  EXPECT_FALSE(is_terminal());
  set_status_line("x");
  ::setenv("TERM", "xterm", 1);
  EXPECT_EQ(terminal.finish(), "");
}

TEST(Log, ThreadsDoNotMixTheirLines) {
  Capture err(STDERR_FILENO);
  std::vector<std::thread> threads;
  for (char c : {'a', 'b', 'c', 'd'})
    threads.emplace_back([c] {
      for (int i = 0; i < 200; ++i) {
        log_info(std::string(60, c));
        set_status_line("x");
      }
    });
  for (std::thread& thread : threads) thread.join();
  const std::string text = err.finish();
  EXPECT_EQ(text.size(), 4u * 200 * 61);
  for (size_t i = 0; i < text.size(); i += 61) {
    ASSERT_EQ(text.substr(i, 60), std::string(60, text[i]));
    ASSERT_EQ(text[i + 60], '\n');
  }
}

TEST(ProgressBar, IsOneLineWithoutATerminal) {
  Capture err(STDERR_FILENO);
  {
    ProgressBar progress("reading a.jsonl", 2800000, "B");
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 7000; ++i) progress.advance(100);
      });
    for (std::thread& thread : threads) thread.join();
    progress.finish();
  }
  const std::string text = err.finish();
  EXPECT_THAT(text, StartsWith("reading a.jsonl  2.8 MB in 0:0"));
  EXPECT_THAT(text, EndsWith("B/s\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST(ProgressBar, SaysHowFarItCameWhenItStopsEarly) {
  Capture err(STDERR_FILENO);
  {
    ProgressBar("tokenizing", 1000, "documents").advance(432);
  }
  EXPECT_THAT(err.finish(), StartsWith("tokenizing  43%  432 of 1,000 documents in 0:00"));
}

TEST(ProgressBar, ShowsRateAndEtaOnATerminal) {
  Terminal terminal(100);
  {
    ProgressBar progress("reading", 4000, "B");
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    progress.advance(1000);
    ProgressBar unknown("counting", 0, "documents");
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    unknown.advance(5);
  }
  const std::string text = terminal.finish();
  EXPECT_THAT(text, HasSubstr("reading  25%  1.0 kB of 4.0 kB  "));
  EXPECT_THAT(text, HasSubstr("/s  ETA 0:0"));
  EXPECT_THAT(text, HasSubstr("counting  5 documents  "));
}

}  // namespace
}  // namespace megatron
