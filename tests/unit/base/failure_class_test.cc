#include "megatron/base/failure_class.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <new>

#include "megatron/base/exit_codes.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/base/process.h"
#include "megatron/base/process_signals.h"
#include "tests/unit/base/capture.h"

namespace megatron {
namespace {

using testing::HasSubstr;

TEST(FailureClass, EveryErrorHasOne) {
  EXPECT_EQ(failure_class(UsageError("x")), FailureClass::kUsage);
  EXPECT_EQ(failure_class(RetryError("x")), FailureClass::kRetry);
  EXPECT_EQ(failure_class(Error("x")), FailureClass::kDoNotRetry);
  EXPECT_EQ(failure_class(InternalError("x")), FailureClass::kInternal);
  EXPECT_EQ(failure_class(std::out_of_range("x")), FailureClass::kInternal);
  EXPECT_EQ(failure_class(std::bad_alloc()), FailureClass::kDoNotRetry);
  EXPECT_EQ(failure_class(std::runtime_error("x")), FailureClass::kDoNotRetry);
  const auto system = [](int number) {
    return failure_class(std::filesystem::filesystem_error("x", {number, std::system_category()}));
  };
  EXPECT_EQ(system(EIO), FailureClass::kRetry);
  EXPECT_EQ(system(ENOSPC), FailureClass::kDoNotRetry);
}

TEST(FailureClass, CodesAreThoseOfTheDocuments) {
  EXPECT_EQ(exit_code(FailureClass::kDoNotRetry), 1);
  EXPECT_EQ(exit_code(FailureClass::kUsage), 2);
  EXPECT_EQ(exit_code(FailureClass::kInternal), 3);
  EXPECT_EQ(exit_code(FailureClass::kRetry), 75);
  EXPECT_EQ(to_string(FailureClass::kDoNotRetry), "do-not-retry");
  EXPECT_EQ(to_string(FailureClass::kRetry), "retry");
}

TEST(FailureClass, ErrorsOfTheSystemGoByTheirNumber) {
  for (const int number : {EIO, ESTALE, ETIMEDOUT, ECONNRESET})
    EXPECT_THROW(throw_system_error("x", number), RetryError) << number;
  for (const int number : {ENOSPC, EDQUOT, EFBIG, EACCES, ENOENT, EROFS}) {
    try {
      throw_system_error("x", number);
    } catch (const std::exception& error) {
      EXPECT_EQ(failure_class(error), FailureClass::kDoNotRetry) << number;
    }
  }
}

TEST(Process, IsKnownByItsNumberAndItsStart) {
  const int64_t pid = ::getpid();
  EXPECT_TRUE(process_is_alive(pid, process_start(pid)));
  EXPECT_FALSE(process_is_alive(pid, process_start(pid) + 1));  // an earlier process of this number
  EXPECT_FALSE(process_is_alive(0, 0));
  EXPECT_EQ(host_name().find_first_of("- /"), std::string::npos);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

void say_hook(int) {
  if (::write(STDERR_FILENO, "hook\n", 5) < 0) return;
}

TEST(CrashHandler, NamesRankSignalThreadAndCalls) {
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
    const auto crash = [&] {
      install_crash_handler();
      set_crash_prefix("[rank 3] ");
      set_crash_hook(say_hook);
      ::raise(number);
    };
    EXPECT_EXIT(
        crash(), testing::KilledBySignal(number),
        testing::AllOf(HasSubstr(cat("fatal: [rank 3] crashed with ", signal_name(number), " (")),
                       HasSubstr(cat(" on ", host_name())), HasSubstr("detail: backtrace"),
                       HasSubstr("base_test"), HasSubstr("hook")));
  }
}

TEST(CrashHandler, NamesTheAddressOfAFault) {
  const auto fault = [] {
    install_crash_handler();
    *reinterpret_cast<volatile int*>(uintptr_t{0x1234}) = 1;
  };
  EXPECT_EXIT(fault(), testing::KilledBySignal(SIGSEGV),
              "invalid memory access\\) at address 0x1234 in thread");
}

int recurse(int depth) {
  volatile char page[4096] = {};
  page[depth % 4096] = 1;
  return depth < 0 ? 0 : recurse(depth + 1) + page[0];
}

TEST(CrashHandler, ReportsAStackThatOverflowed) {
  const auto overflow = [] {
    install_crash_handler();
    ::exit(recurse(1) & 1);
  };
  EXPECT_EXIT(overflow(), testing::KilledBySignal(SIGSEGV), "crashed with SIGSEGV");
}

#endif

TEST(Signals, AFileBeyondTheLimitIsAnError) {
  const auto write = [] {
    ignore_file_size_signal();
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::string message = "nothing thrown";
    try {
      write_file_atomically(std::filesystem::path(testing::TempDir()) / "too_long",
                            std::string(10000, 'x'));
    } catch (const Error& error) {
      message = error.what();
    }
    if (::write(STDERR_FILENO, message.data(), message.size()) < 0) return;
    ::_exit(7);
  };
  EXPECT_EXIT(write(), testing::ExitedWithCode(7), "too_long: File too large");
}

TEST(Signals, TheReaderOfStandardOutputMayGo) {
  const auto print = [] {
    int ends[2];
    if (::pipe(ends) != 0) ::_exit(1);
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[0]);
    make_standard_output_optional();
    print_line("one");
    print_line("two");
    check_standard_output();
    ::_exit(7);
  };
  EXPECT_EXIT(print(), testing::ExitedWithCode(7),
              "^warning: the reader of standard output is gone: the run goes on without it\n$");
}

}  // namespace
}  // namespace megatron
