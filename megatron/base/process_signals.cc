#include "megatron/base/process_signals.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "megatron/base/process.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEGATRON_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define MEGATRON_SANITIZED 1
#endif
#endif

namespace megatron {
namespace {

constexpr int kCrashSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kMaxFrames = 64;

// Prepared for the handler, which may neither allocate nor format.
char crash_prefix[64] = "";
char crash_host[128] = "";
std::atomic<CrashHook> crash_hook{nullptr};
std::atomic<int64_t> crashing_thread{0};
alignas(64) char handler_stack[256 * 1024];  // for stack overflows

void write_text(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

void write_number(uint64_t value, unsigned base) {
  char digits[24];
  char* at = std::end(digits);
  *--at = '\0';
  do *--at = "0123456789abcdef"[value % base];
  while (value /= base);
  write_text(at);
}

const char* meaning(int number) {
  switch (number) {
    case SIGSEGV:
      return "invalid memory access";
    case SIGBUS:
      return "memory that has no storage behind it: a mapped file that was cut, a full /dev/shm, "
             "or hardware";
    case SIGFPE:
      return "integer division by zero or overflow";
    case SIGILL:
      return "an instruction that this CPU does not have";
    default:
      return "abort";
  }
}

void describe(int number, const siginfo_t* info, int64_t thread) {
  char name[32] = "?";
  prctl(PR_GET_NAME, name);
  write_text("\nfatal: ");
  write_text(crash_prefix);
  write_text("crashed with ");
  write_text(signal_name(number));
  write_text(" (");
  write_text(meaning(number));
  write_text(")");
  if (number != SIGABRT && info->si_code > 0) {  // raised by a fault, not by kill()
    write_text(" at address 0x");
    write_number(reinterpret_cast<uintptr_t>(info->si_addr), 16);
  }
  write_text(" in thread ");
  write_number(static_cast<uint64_t>(thread), 10);
  write_text(" (");
  write_text(name);
  write_text(") of process ");
  write_number(static_cast<uint64_t>(getpid()), 10);
  write_text(" on ");
  write_text(crash_host);
  write_text("\ndetail: backtrace, innermost call first:\n");
  void* frames[kMaxFrames];
  const int count = backtrace(frames, kMaxFrames);
  const int own = std::min(2, count);  // frames of describe() and the handler
  backtrace_symbols_fd(frames + own, count - own, STDERR_FILENO);
  write_text("hint: addr2line -Cfpe FILE ADDRESS names the source lines; please report them\n");
}

void on_crash(int number, siginfo_t* info, void*) {
  const int64_t thread = syscall(SYS_gettid);
  int64_t nobody = 0;
  if (crashing_thread.compare_exchange_strong(nobody, thread)) {
    describe(number, info, thread);
    if (const CrashHook hook = crash_hook) hook(number);
  } else if (nobody != thread) {
    for (;;) pause();  // only the first thread to crash reports
  }
  signal(number, SIG_DFL);
  raise(number);  // delivered when the handler returns; a fault would recur by itself
}

}  // namespace

void install_crash_handler() {
#ifndef MEGATRON_SANITIZED
  std::strncpy(crash_host, host_name().c_str(), sizeof crash_host - 1);
  void* frame;
  backtrace(&frame, 1);  // loads its library now, which the handler could not do
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, nullptr);
  for (const int number : kCrashSignals) {
    struct sigaction action{};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(number, &action, nullptr);
  }
#endif
}

void set_crash_prefix(const std::string& prefix) {
  std::strncpy(crash_prefix, prefix.c_str(), sizeof crash_prefix - 1);
}

void set_crash_hook(CrashHook hook) { crash_hook = hook; }

const char* signal_name(int number) {
  switch (number) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    case SIGABRT:
      return "SIGABRT";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGUSR2:
      return "SIGUSR2";
    default:
      return nullptr;
  }
}

void ignore_file_size_signal() { signal(SIGXFSZ, SIG_IGN); }

}  // namespace megatron
