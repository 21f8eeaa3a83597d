#include "megatron/base/log.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/process_signals.h"

namespace megatron {
namespace {

std::atomic<bool> quiet_rank{false};

// The state of the terminal. Never destroyed, so that threads may log while the process exits.
struct Screen {
  std::mutex mutex;
  std::string prefix;
  std::string status;    // the status line shown now; empty: none
  int output_error = 0;  // errno of the first line of results that could not be written
  bool output_is_optional = false;
  bool output_is_gone = false;  // the reader has closed it, which has been logged
};

Screen& screen() {
  static Screen* const instance = new Screen;
  return *instance;
}

// One system call per line, so that lines of several processes do not mix. Returns 0 or errno.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t done = ::write(fd, text.data(), text.size());
    if (done >= 0) {
      text.remove_prefix(static_cast<size_t>(done));
    } else if (errno == EAGAIN) {  // another process made the terminal or pipe non-blocking
      pollfd ready{fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

constexpr std::string_view kClearLine = "\r\x1b[K";

size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

// At most `width` characters (UTF-8 sequences count as one), control characters become spaces.
std::string cut(std::string_view text, size_t width) {
  std::string out;
  size_t shown = 0;
  for (const char c : text) {
    const bool starts_character = (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    if (starts_character && shown++ == width) break;
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c;
  }
  return out;
}

void log(std::string_view label, std::string_view message) {
  Screen& s = screen();
  const std::lock_guard lock(s.mutex);
  write_all(STDERR_FILENO,
            cat(s.status.empty() ? "" : kClearLine, s.prefix, label, message, "\n", s.status));
}

}  // namespace

void set_log_prefix(std::string prefix) {
  const std::lock_guard lock(screen().mutex);
  screen().prefix = std::move(prefix);
}

void set_quiet(bool quiet) { quiet_rank = quiet; }

void log_info(std::string_view message) {
  if (!quiet_rank) log("", message);
}
void log_warning(std::string_view message) { log("warning: ", message); }
void log_error(std::string_view message) { log("error: ", message); }

void make_standard_output_optional() {
  signal(SIGPIPE, SIG_IGN);
  const std::lock_guard lock(screen().mutex);
  screen().output_is_optional = true;
}

void print_line(std::string_view line) {
  if (quiet_rank) return;
  Screen& s = screen();
  const std::lock_guard lock(s.mutex);
  if (s.output_is_gone) return;
  const bool above_status = !s.status.empty() && ::isatty(STDOUT_FILENO) == 1;
  if (above_status) write_all(STDERR_FILENO, kClearLine);
  std::string out(line);
  out += '\n';
  const int error = write_all(STDOUT_FILENO, out);
  if (error == EPIPE && s.output_is_optional) {
    s.output_is_gone = true;
    write_all(STDERR_FILENO,
              cat(s.prefix,
                  "warning: the reader of standard output is gone: the run goes on without it\n"));
  } else if (s.output_error == 0) {
    s.output_error = error;
  }
  if (above_status) write_all(STDERR_FILENO, s.status);
}

void check_standard_output() {
  const std::lock_guard lock(screen().mutex);
  int error = std::exchange(screen().output_error, 0);
  // Output through the C library may fail only now.
  if (std::fflush(stdout) != 0 && error == 0 && !screen().output_is_gone) error = errno;
  MEGATRON_CHECK(error == 0,
                 "cannot write to standard output: ", std::generic_category().message(error));
}

bool is_terminal() {
  if (::isatty(STDERR_FILENO) != 1) return false;
  const char* kind = std::getenv("TERM");
  return kind == nullptr || std::string_view(kind) != "dumb";
}

void set_status_line(std::string_view text) {
  if (quiet_rank) return;
  Screen& s = screen();
  const std::lock_guard lock(s.mutex);
  if (!is_terminal()) {
    s.status.clear();
    return;
  }
  if (text.empty() && s.status.empty()) return;
  // The last column stays empty: writing to it makes some terminals wrap.
  s.status = cut(text, terminal_width() - 1);
  write_all(STDERR_FILENO, std::string(kClearLine) + s.status);
}

}  // namespace megatron
