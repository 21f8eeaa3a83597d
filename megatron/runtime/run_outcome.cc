#include "megatron/runtime/run_outcome.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/process.h"
#include "megatron/base/process_signals.h"

namespace megatron {
namespace {

// Appends to a buffer of fixed size without allocating.
class SignalSafeText {
 public:
  void add(const char* text) {
    while (*text != '\0' && size_ + 1 < sizeof text_) text_[size_++] = *text++;
  }
  void add(uint64_t number) {
    char digits[24];
    char* at = digits + sizeof digits;
    *--at = '\0';
    do *--at = static_cast<char>('0' + number % 10);
    while (number /= 10);
    add(at);
  }
  bool write_to(int fd) const {
    for (size_t done = 0; done < size_;) {
      const ssize_t written = ::write(fd, text_ + done, size_ - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      done += static_cast<size_t>(written);
    }
    return true;
  }

 private:
  char text_[16384];
  size_t size_ = 0;
};

// The last words of this process, for signal handlers.
std::atomic<const OutcomeLastWords*> current_last_words{nullptr};

}  // namespace

// outcome.json except for signal, iteration and time.
struct OutcomeLastWords {
  std::string path, temporary;
  std::string begin;  // without the closing brace
  const std::atomic<int64_t>* iteration = nullptr;
};

PreviousOutcome read_previous_outcome(const std::filesystem::path& folder) {
  PreviousOutcome previous;
  try {
    if (!std::filesystem::is_regular_file(folder / kOutcomeName)) return previous;
    const nlohmann::json json = nlohmann::json::parse(read_file(folder / kOutcomeName));
    previous.attempt = std::max<int64_t>(json.at("attempt").get<int64_t>(), 0);
    previous.seconds_per_save = std::max(json.at("seconds_per_save").get<double>(), 0.0);
  } catch (const std::exception&) {
    // The outcome is only informative.
  }
  return previous;
}

RunOutcome::RunOutcome(std::filesystem::path folder, int rank, int restart_count)
    : folder_(std::move(folder)),
      rank_(rank),
      restart_count_(restart_count),
      previous_(read_previous_outcome(folder_)),
      attempt_(previous_.attempt + 1),
      started_(seconds_since_1970()),
      seconds_per_save_(previous_.seconds_per_save) {}

RunOutcome::~RunOutcome() {
  for (const auto& words : last_words_) {
    const OutcomeLastWords* mine = words.get();
    current_last_words.compare_exchange_strong(mine, nullptr);
  }
}

void RunOutcome::add_identity(JsonWriter& json) const {
  json.member("attempt", attempt_)
      .member("restart_count", restart_count_)
      .member("started", started_);
  json.member("host", host_name())
      .member("pid", static_cast<int64_t>(::getpid()))
      .member("rank", rank_);
  json.member("process_start", process_start(::getpid()));
}

std::string RunOutcome::text(const char* outcome, const char* failure, const int* exit_code,
                             int failed_rank, const std::string& reason) const {
  JsonWriter json(2);
  json.begin_object().member("outcome", outcome).member("class", failure);
  json.key("exit_code");
  exit_code ? json.value(*exit_code) : json.null();
  json.member("reason", reason).key("failed_rank");
  failed_rank >= 0 ? json.value(failed_rank) : json.null();
  json.member("iteration", iteration_.load()).key("last_saved_iteration");
  saved_iteration_ >= 0 ? json.value(saved_iteration_) : json.null();
  json.member("last_saved_directory", saved_directory_)
      .member("seconds_per_save", seconds_per_save_);
  json.member("time", seconds_since_1970());
  add_identity(json);
  return json.end_object().text() + "\n";
}

// On a full disk there may be no space for a new file, but that of the old one can be overwritten.
void RunOutcome::write_in_place(const std::string& text) const {
  const std::filesystem::path path = folder_ / kOutcomeName;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
  const bool written =
      fd >= 0 && ::pwrite(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()) &&
      ::ftruncate(fd, static_cast<off_t>(text.size())) == 0 && ::fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!written) log_warning(cat(path.string(), " cannot be written: ", std::strerror(error)));
}

void RunOutcome::write_end(const std::string& text) const {
  try {
    write_file_atomically(folder_ / kOutcomeName, text);
  } catch (const std::exception&) {
    write_in_place(text);
  }
}

void RunOutcome::begin() {
  const std::lock_guard guard(mutex_);
  std::filesystem::create_directories(folder_);
  write_file_atomically(folder_ / kOutcomeName,
                        text("running", "running", nullptr, -1, "started, and has not ended"));
  begun_ = true;
  prepare_last_words();
}

void RunOutcome::follow(int64_t attempt) {
  const std::lock_guard guard(mutex_);
  attempt_ = attempt;
  follows_ = true;
}

bool RunOutcome::another_has_written() const {
  try {
    const nlohmann::json json = nlohmann::json::parse(read_file(folder_ / kOutcomeName));
    return json.at("attempt") != attempt_ || json.at("outcome") != "running";
  } catch (const std::exception&) {
    return false;
  }
}

void RunOutcome::set_saved(int64_t iteration, const std::string& directory, double seconds) {
  const std::lock_guard guard(mutex_);
  if (iteration == saved_iteration_ && directory == saved_directory_) return;
  saved_iteration_ = iteration;
  saved_directory_ = directory;
  seconds_per_save_ = std::max(seconds_per_save_, seconds);
  if (begun_ && !ended_) prepare_last_words();
}

void RunOutcome::end(RunEnd end, int exit_code, const std::string& reason) {
  const std::lock_guard guard(mutex_);
  if (std::exchange(ended_, true)) return;
  current_last_words = nullptr;
  const char* name = end == RunEnd::kFinished ? "finished" : "stopped";
  write_end(text(name, name, &exit_code, -1, reason));
}

void RunOutcome::fail(FailureClass failure, int rank, const std::string& reason) {
  const std::lock_guard guard(mutex_);
  if (std::exchange(ended_, true)) return;
  current_last_words = nullptr;
  if (follows_ && another_has_written()) return;
  const int code = exit_code(failure);
  write_end(text("failed", std::string(to_string(failure)).c_str(), &code, rank, reason));
}

// Call with the lock held.
void RunOutcome::prepare_last_words() {
  auto words = std::make_unique<OutcomeLastWords>();
  words->path = (folder_ / kOutcomeName).string();
  words->temporary = cat(words->path, ".tmp-", ::getpid(), "-signal");
  words->iteration = &iteration_;
  JsonWriter json(2);
  json.begin_object().member("outcome", "failed").member("class", to_string(FailureClass::kRetry));
  json.member("failed_rank", rank_).key("last_saved_iteration");
  saved_iteration_ >= 0 ? json.value(saved_iteration_) : json.null();
  json.member("last_saved_directory", saved_directory_)
      .member("seconds_per_save", seconds_per_save_);
  add_identity(json);
  words->begin = json.end_object().text();
  words->begin.resize(words->begin.rfind('\n'));  // without the closing brace
  current_last_words = words.get();
  last_words_.push_back(std::move(words));
}

void write_outcome_of_signal(int signal) {
  const OutcomeLastWords* words = current_last_words.exchange(nullptr);
  if (words == nullptr) return;
  SignalSafeText text;
  text.add(words->begin.c_str());
  text.add(",\n  \"iteration\": ");
  text.add(static_cast<uint64_t>(std::max<int64_t>(words->iteration->load(), 0)));
  text.add(",\n  \"exit_code\": ");
  text.add(static_cast<uint64_t>(128 + signal));
  text.add(",\n  \"time\": ");
  text.add(static_cast<uint64_t>(std::time(nullptr)));
  text.add(",\n  \"reason\": \"ended by signal ");
  text.add(static_cast<uint64_t>(signal));
  if (const char* name = signal_name(signal)) {
    text.add(" (");
    text.add(name);
    text.add(")");
  }
  text.add("; nothing was saved after the last checkpoint\"\n}\n");
  const int fd = ::open(words->temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const bool written = text.write_to(fd) && ::fsync(fd) == 0;
  ::close(fd);
  if (written)
    ::rename(words->temporary.c_str(), words->path.c_str());
  else
    ::unlink(words->temporary.c_str());
}

}  // namespace megatron
