#include "megatron/comm/failure_monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/process.h"
#include "megatron/comm/detail/failure_report.h"
#include "megatron/comm/detail/steady_seconds.h"

namespace megatron {
namespace {

using Clock = std::chrono::steady_clock;
using Condition = RankState::Condition;

constexpr double kBeatSeconds = 1.0;   // between signs of life
constexpr double kTickSeconds = 0.25;  // between looks at the peers
// A gap between two looks at the clock that says that this process, or its machine, was paused.
constexpr double kPauseSeconds = 2.0;
// How long the reporting rank waits for the others' states
constexpr double kCollectSeconds = 1.5;
constexpr double kVerdictSeconds = 3.0;  // how long the others wait for the verdict
// How long the main thread may take to exit by itself after the report
constexpr double kUnwindSeconds = 1.0;
// In which the lowest rank of a machine without a store has seen what the others have
constexpr double kLowestExaminesSeconds = 1.0;
constexpr double kStuckStoreSeconds = 4.0;  // after which a call to the store counts as hung
// After SIGTERM: time to find out whether a dead peer is the cause
constexpr double kTerminatedSeconds = 0.5;

void sleep_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Whether a process is stopped: state T in /proc/<pid>/stat, which follows the name in parentheses.
bool is_stopped(pid_t pid) {
  std::ifstream in(cat("/proc/", pid, "/stat"));
  std::stringstream text;
  text << in.rdbuf();
  const size_t name_end = text.str().rfind(") ");
  return name_end != std::string::npos &&
         (text.str()[name_end + 2] == 'T' || text.str()[name_end + 2] == 't');
}

int open_process(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

void write_to_stderr(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (written <= 0) return;
    done += static_cast<size_t>(written);
  }
}

// A rank on this machine. The file descriptor becomes readable when the process ends.
struct WatchedProcess {
  int rank;
  pid_t pid;
  int fd;  // negative if the kernel does not support it

  bool gone() const {
    pollfd poller{fd, POLLIN, 0};
    return fd >= 0 && poll(&poller, 1, 0) == 1;
  }
};

// Signal and terminate handlers take no context: this is the one monitor of the process.
struct ProcessHooks {
  std::atomic<FailureMonitor*> monitor{nullptr};
  std::atomic<int> wake_fd{-1};
  std::atomic<bool> terminated{false};
  std::terminate_handler previous_terminate = nullptr;
  struct sigaction previous_sigterm{};
  bool handles_sigterm = false;
};
ProcessHooks hooks;

void wake(int fd) {
  const uint64_t one = 1;
  if (fd >= 0 && write(fd, &one, sizeof one) < 0) return;
}

void on_sigterm(int) {  // async-signal-safe calls only
  hooks.terminated = true;
  wake(hooks.wake_fd);
}

[[noreturn]] void on_terminate() {
  if (FailureMonitor* monitor = hooks.monitor) {
    try {
      if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
      monitor->fail(Error("std::terminate was called"));
    } catch (const std::exception& error) {
      monitor->fail(error);
    } catch (...) {
      monitor->fail(Error("an exception of unknown type"));
    }
    _exit(monitor->failure_exit_code());
  }
  std::abort();
}

struct LocalFailure {
  std::string text;
  bool consequence = false;
  int culprit = -1;
  FailureClass failure = FailureClass::kDoNotRetry;
};

}  // namespace

struct FailureMonitor::Impl {
  Launch launch;
  std::string place;
  std::shared_ptr<CollectiveHistory> history;
  std::shared_ptr<Store> store;  // used by the monitor's thread only
  std::string process = cat("process ", getpid(), " on ", machine_name());
  std::atomic<double> timeout;
  std::atomic<double> last_tick{0};       // of awake_seconds()
  std::atomic<int64_t> work{0};           // calls of progress() of this rank
  std::atomic<double> last_work{-1e300};  // when progress of any rank was last seen
  std::mutex clock_mutex;
  const double clock_start = steady_seconds();
  double last_reading = clock_start;
  double paused = 0;
  std::mutex alone_mutex;
  bool alone = false;  // the store is lost, which is being reported

  std::mutex mutex;
  std::condition_variable changed;
  std::optional<LocalFailure> failure;  // of this rank
  std::function<void(const JobFailure&)> on_failure;
  std::atomic<FailureClass> failure_of_job{FailureClass::kRetry};
  bool reported = false;
  bool leaving = false;
  bool left = false;
  std::thread thread;
  std::thread guard;

  // Used by the monitor's thread only:
  bool told = false;  // the failure has been reported by some rank
  std::vector<WatchedProcess> neighbours;
  // Last heartbeat of each watched rank, and when it changed
  std::map<int, std::pair<std::string, double>> beats;
  int64_t num_beats = 0;
  double last_beat = 0;
  int64_t told_work = 0;             // value of `work` in the last heartbeat
  std::optional<int64_t> seen_work;  // sum over the ranks, while a call is overdue
  int64_t failure_order = 0;

  Impl(const Launch& job, const Connection& connection, std::string where, double timeout_seconds)
      : launch(job),
        place(std::move(where)),
        history(connection.history),
        store(connection.store->connection("monitor")),  // nothing else may hold it up
        timeout(timeout_seconds) {
    for (const Neighbour& neighbour : connection.neighbours)
      neighbours.push_back({neighbour.rank, neighbour.pid, open_process(neighbour.pid)});
  }

  // -- time

  // Seconds in which this process could run: pauses of the process or of its machine, which say
  // nothing about the other ranks, are left out. The guard asks every kTickSeconds. Any thread.
  double awake_seconds() {
    const std::lock_guard lock(clock_mutex);
    const double now = steady_seconds(), gap = now - std::exchange(last_reading, now);
    if (gap > kPauseSeconds) {
      paused += gap;
      last_work = now;  // calls in flight have waited through the pause, too
    }
    return now - clock_start - paused;
  }

  // -- this rank

  std::optional<LocalFailure> local_failure() {
    std::lock_guard lock(mutex);
    return failure;
  }

  RankState own_state() {
    RankState state;
    state.rank = launch.rank;
    state.place = place;
    state.process = process;
    state.history = history->snapshot();
    if (state.history.under_way.size() > 8) state.history.under_way.resize(8);
    if (const std::optional<LocalFailure> error = local_failure()) {
      if (failure_order == 0) failure_order = store->add("failures", 1);
      state.condition = Condition::kFailed;
      state.error = error->text;
      state.consequence = error->consequence;
      state.culprit = error->culprit;
      state.failure = error->failure;
      state.order = failure_order;
    }
    return state;
  }

  void beat() {
    if (steady_seconds() - last_beat < kBeatSeconds) return;
    last_beat = steady_seconds();
    if (const int64_t now = work; std::exchange(told_work, now) != now) store->add("work", 1);
    RankState state = own_state();
    state.history.issued.clear();
    if (state.history.finished.size() > 1)
      state.history.finished.erase(state.history.finished.begin(),
                                   state.history.finished.end() - 1);
    store->set(cat("beat/", launch.rank),
               cat(++num_beats, " ", static_cast<int64_t>(seconds_since_1970() * 1000), " ",
                   to_json(state)));
  }

  // -- peers

  bool has_left(int rank) { return store->find(cat("left/", rank)).has_value(); }

  bool neighbour_is_gone() {
    for (auto neighbour = neighbours.begin(); neighbour != neighbours.end();) {
      if (!neighbour->gone()) {
        ++neighbour;
      } else if (has_left(neighbour->rank)) {
        close(neighbour->fd);
        neighbour = neighbours.erase(neighbour);
      } else {
        return true;
      }
    }
    return false;
  }

  // Whether a watched rank has missed its heartbeats for the timeout. Rank 0 watches all ranks, the
  // others watch rank 0.
  bool peer_is_silent() {
    const double now = awake_seconds();
    bool silent = false;
    const int end = launch.rank == 0 ? launch.world_size : 1;
    for (int rank = 0; rank < end; ++rank) {
      if (rank == launch.rank) continue;
      const std::string sign = store->find(cat("beat/", rank)).value_or("");
      auto& [last, when] = beats.try_emplace(rank, "", now).first->second;
      if (sign != last) {
        last = sign;
        when = now;
      }
      if (now - when > timeout && !has_left(rank)) silent = true;
    }
    return silent;
  }

  // What is known about a rank that has not answered.
  RankState state_from_outside(int rank) {
    RankState state;
    if (const std::optional<std::string> last_words = store->find(cat("left/", rank)))
      return rank_state_from_json(*last_words);
    if (const std::optional<std::string> sign = store->find(cat("beat/", rank))) {
      std::istringstream in(*sign);
      int64_t number = 0, wall_ms = 0;
      in >> number >> wall_ms;
      std::string json;
      std::getline(in, json);
      state = rank_state_from_json(json);
      state.silent_seconds =
          std::max(0.0, seconds_since_1970() - static_cast<double>(wall_ms) / 1000);
      state.history.now += state.silent_seconds;
    }
    state.rank = rank;
    if (state.process.empty()) state.process = "its process";
    if (state.condition == Condition::kFailed) return state;
    state.condition = Condition::kSilent;
    for (const WatchedProcess& neighbour : neighbours) {
      if (neighbour.rank != rank) continue;
      if (neighbour.gone()) state.condition = Condition::kGone;
      state.stopped = is_stopped(neighbour.pid);
    }
    return state;
  }

  // Whether a call of this rank has waited for the timeout, during which no rank made progress on a
  // checkpoint. The others' progress is queried only when a call is overdue.
  bool call_is_stuck() {
    awake_seconds();
    const double age = history->oldest_age();
    if (age < timeout / 4) {
      seen_work.reset();
      return false;
    }
    const int64_t now = store->add("work", 0);
    if (seen_work && *seen_work != now) last_work = steady_seconds();
    seen_work = now;
    return age > timeout && steady_seconds() - last_work > timeout;
  }

  // -- the failure

  // Records the verdict with which every rank exits. `speaks`: this rank also runs when_failed().
  void conclude(const FailureReport& report, bool speaks) {
    failure_of_job = report.failure;
    std::function<void(const JobFailure&)> callback;
    {
      std::lock_guard lock(mutex);
      callback = std::exchange(on_failure, nullptr);
    }
    if (!speaks || !callback) return;
    std::string text = report.text;
    if (text.starts_with("error: ")) text.erase(0, 7);
    if (text.ends_with('\n')) text.pop_back();
    callback({report.culprit, report.failure, text});
  }

  // The reporter: collects the states of all ranks, explains the failure and publishes the verdict.
  void report() {
    std::map<int, RankState> answers;
    const double deadline = steady_seconds() + kCollectSeconds;
    for (;;) {
      answers[launch.rank] = own_state();
      for (int rank = 0; rank < launch.world_size; ++rank) {
        if (rank == launch.rank) continue;
        if (const std::optional<std::string> text = store->find(cat("state/", rank)))
          answers[rank] = rank_state_from_json(*text);
      }
      if (steady_seconds() > deadline || is_clear(answers)) break;
      sleep_seconds(0.02);
    }
    std::vector<RankState> states;
    std::string silent;
    for (int rank = 0; rank < launch.world_size; ++rank) {
      const auto answer = answers.find(rank);
      states.push_back(answer != answers.end() ? answer->second : state_from_outside(rank));
      if (states.back().condition == Condition::kSilent) silent += cat(rank, " ");
    }
    const FailureReport report = explain_failure(states);
    write_to_stderr(report.text);
    told = true;
    const int64_t num_readers = static_cast<int64_t>(answers.size());
    store->set("report", report.text);
    store->set("verdict", cat(num_readers, " ", static_cast<int>(report.failure), " ",
                              report.culprit, " ", silent));
    conclude(report, launch.rank == 0 || !answers.contains(0));
    kill_neighbours(silent);
    hold_store_for(num_readers);
  }

  // If this rank hosts the store, keeps it until all others have read the verdict.
  void hold_store_for(int64_t num_readers) {
    int64_t num_read = store->add("verdict_read", 1);
    if (launch.rank != 0 || launch.store_is_hosted) return;
    for (const double end = steady_seconds() + 1; num_read < num_readers && steady_seconds() < end;
         sleep_seconds(0.02))
      num_read = store->add("verdict_read", 0);
  }

  // Whether the states suffice to explain the failure: every rank has answered or never will, and
  // if all errors are consequences, their cause has nothing to add.
  bool is_clear(const std::map<int, RankState>& answers) {
    bool any_failed = false, cause_known = false;
    for (const auto& [rank, state] : answers) {
      any_failed = any_failed || state.condition == Condition::kFailed;
      cause_known = cause_known || (state.condition == Condition::kFailed &&
                                    (!state.consequence || state.culprit >= 0));
    }
    for (int rank = 0; rank < launch.world_size; ++rank) {
      if (answers.contains(rank)) continue;
      const auto neighbour = std::find_if(neighbours.begin(), neighbours.end(),
                                          [&](const WatchedProcess& n) { return n.rank == rank; });
      const bool gone = neighbour != neighbours.end() && neighbour->gone();
      if (gone) cause_known = true;
      if (!gone && !has_left(rank)) return false;
    }
    return cause_known || !any_failed;
  }

  // On the other ranks: sends this rank's state and waits for the verdict.
  void answer() {
    store->set(cat("state/", launch.rank), to_json(own_state()));
    bool told_failure = failure_order > 0;
    std::optional<std::string> verdict;
    for (const double end = steady_seconds() + kVerdictSeconds; !verdict && steady_seconds() < end;
         sleep_seconds(0.02)) {
      verdict = store->find("verdict");
      if (!told_failure && local_failure()) {
        store->set(cat("state/", launch.rank), to_json(own_state()));
        told_failure = true;
      }
    }
    if (!verdict) {  // the reporter is lost, too
      const FailureReport report = explain_failure({own_state()});
      write_to_stderr(report.text);
      told = true;
      conclude(report, launch.rank == 0);
      return;
    }
    told = true;
    int64_t num_readers = 0;
    int failure = 0;
    FailureReport report;
    std::string silent;
    std::istringstream in(*verdict);
    in >> num_readers >> failure >> report.culprit;
    std::getline(in, silent);
    report.failure = static_cast<FailureClass>(failure);
    report.text = store->find("report").value_or("");
    conclude(report, launch.rank == 0);
    kill_neighbours(silent);
    hold_store_for(num_readers);
  }

  void kill_neighbours(const std::string& ranks) {
    std::istringstream in(ranks);
    for (int rank; in >> rank;) {
      for (const WatchedProcess& neighbour : neighbours) {
        if (neighbour.rank == rank && neighbour.fd >= 0)
          syscall(SYS_pidfd_send_signal, neighbour.fd, SIGKILL, nullptr, 0);
      }
    }
  }

  // Checks everything once; returns true when the job has failed and that has been reported.
  bool look() {
    beat();
    std::optional<std::string> reporter = store->find("failing");
    if (!reporter &&
        (local_failure() || call_is_stuck() || neighbour_is_gone() || peer_is_silent()))
      reporter = store->claim("failing", std::to_string(launch.rank));
    if (!reporter) return false;
    if (*reporter == std::to_string(launch.rank))
      report();
    else
      answer();
    return true;
  }

  // The store is gone: the ranks of each machine decide for themselves, and the lowest of them
  // reports.
  void report_without_store(const std::string& problem) {
    std::lock_guard lock(alone_mutex);  // the guard and the watching thread may both come here
    if (std::exchange(alone, true)) return;
    // The connections of a dying process close shortly before the process counts as gone.
    const auto holder = std::find_if(neighbours.begin(), neighbours.end(),
                                     [](const WatchedProcess& n) { return n.rank == 0; });
    if (holder != neighbours.end() && !launch.store_is_hosted) {
      for (const double end = steady_seconds() + 1;
           steady_seconds() < end && !holder->gone() && !is_stopped(holder->pid);)
        sleep_seconds(0.01);
    }
    bool lowest = true;
    std::string culprit, dead;
    for (const WatchedProcess& neighbour : neighbours) {
      const bool gone = neighbour.gone(), stopped = is_stopped(neighbour.pid);
      if (gone || stopped) dead += cat(neighbour.rank, " ");
      if (neighbour.rank < launch.rank && !gone && !stopped) lowest = false;
      if (neighbour.rank == 0 && (gone || stopped))
        culprit =
            cat("error: [rank 0] ", gone ? "is gone: its process " : "is stopped: its process ",
                neighbour.pid, gone ? " exited without a report\n" : " was stopped by a signal\n");
    }
    const std::optional<LocalFailure> error = local_failure();
    if (lowest || (error && !error->consequence)) {
      std::string text = culprit;
      if (text.empty()) text = error_lines(error ? error->text : problem, launch.rank, place);
      for (const CollectiveCall& call : history->snapshot().under_way)
        text += cat("detail: rank ", launch.rank, " waited in ", to_string(call), "\n");
      text += "hint: rank 0 or the launcher held the store through which ranks report failures\n";
      write_to_stderr(text);
      const bool own = error && !error->consequence;
      conclude({own && culprit.empty() ? launch.rank : 0,
                own ? error->failure : FailureClass::kRetry, text},
               lowest);
    } else {
      sleep_seconds(kLowestExaminesSeconds);  // what is killed here
    }
    kill_neighbours(dead);
    if (!lowest) return;
    // Ranks that notice later must still see a lower rank that reports for all.
    const auto others_left = [&] {
      return std::any_of(neighbours.begin(), neighbours.end(), [&](const WatchedProcess& n) {
        return n.rank > launch.rank && !n.gone() && !is_stopped(n.pid);
      });
    };
    for (const double end = steady_seconds() + kStuckStoreSeconds;
         steady_seconds() < end && others_left();)
      sleep_seconds(0.02);
  }

  void mark_reported() {
    std::lock_guard lock(mutex);
    reported = true;
    changed.notify_all();
  }

  [[noreturn]] void end_process() {
    mark_reported();
    sleep_seconds(kUnwindSeconds);
    _exit(exit_code(failure_of_job));
  }

  void say_goodbye() {
    RankState state = own_state();
    state.condition = Condition::kLeft;
    state.history.under_way.clear();
    store->set(cat("left/", launch.rank), to_json(state));
  }

  // SIGTERM without a failed rank: the launcher or the user wants the job to end.
  void end_by_sigterm() {
    say_goodbye();
    for (const double end = steady_seconds() + kTerminatedSeconds; steady_seconds() < end;
         sleep_seconds(0.02)) {
      if (look()) end_process();
    }
    struct sigaction action{};
    action.sa_handler = SIG_DFL;
    sigaction(SIGTERM, &action, nullptr);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
    kill(getpid(), SIGTERM);
  }

  // Blocks until something happens: a neighbour exits, this rank fails or leaves, a signal, or the
  // next check is due.
  void wait_for_events() {
    std::vector<pollfd> fds = {{hooks.wake_fd, POLLIN, 0}};
    for (const WatchedProcess& neighbour : neighbours) fds.push_back({neighbour.fd, POLLIN, 0});
    // With many ranks, each polls the store less often.
    const double pause = std::max(kTickSeconds, std::min(1.0, launch.world_size / 1024.0));
    if (poll(fds.data(), fds.size(), static_cast<int>(pause * 1000)) > 0 &&
        (fds[0].revents & POLLIN)) {
      uint64_t count;
      if (read(hooks.wake_fd, &count, sizeof count) < 0) return;
    }
  }

  void watch() {
    try {
      for (;;) {
        last_tick = awake_seconds();
        {
          std::lock_guard lock(mutex);
          if (leaving && !failure) break;
        }
        if (look()) end_process();
        if (hooks.terminated) end_by_sigterm();
        wait_for_events();
      }
      leave();
    } catch (const std::exception& error) {
      bool done;
      {
        std::lock_guard lock(mutex);
        done = leaving && !failure;
      }
      if (done) return;  // the store may close before the last rank has left
      if (!told) report_without_store(error.what());
      end_process();
    }
  }

  // Normal exit. The rank that hosts the store leaves last.
  void leave() {
    say_goodbye();
    const int64_t num_left = store->add("num_left", 1);
    if (launch.rank != 0 || launch.store_is_hosted || num_left == launch.world_size) return;
    for (const double end = steady_seconds() + timeout; steady_seconds() < end;
         sleep_seconds(kTickSeconds / 5)) {
      last_tick = awake_seconds();
      if (store->add("num_left", 0) == launch.world_size) return;
      if (look()) end_process();
    }
  }

  // The store itself may hang: its host process is stopped, or the network is down.
  void guard_against_a_stuck_store() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, std::chrono::duration<double>(kTickSeconds),
                             [&] { return left || reported; })) {
      const double stuck = awake_seconds() - last_tick;
      if (stuck < kStuckStoreSeconds) continue;
      lock.unlock();
      const bool call_is_old =
          history->oldest_age() > timeout + 0.5 && steady_seconds() - last_work > timeout + 0.5;
      if (call_is_old || stuck > timeout || local_failure()) {
        report_without_store(cat("the store has not answered for ", static_cast<int>(stuck), " s"));
        end_process();
      }
      lock.lock();
    }
  }
};

FailureMonitor::FailureMonitor(const Launch& launch, const Connection& connection,
                               std::string place, double timeout_seconds) {
  if (!connection.store) return;
  impl_ = std::make_unique<Impl>(launch, connection, std::move(place), timeout_seconds);
  FailureMonitor* none = nullptr;
  MEGATRON_ASSERT(hooks.monitor.compare_exchange_strong(none, this),
                  "two failure monitors in one process");
  hooks.terminated = false;
  hooks.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  hooks.previous_terminate = std::set_terminate(on_terminate);
  sigaction(SIGTERM, nullptr, &hooks.previous_sigterm);
  hooks.handles_sigterm = hooks.previous_sigterm.sa_handler == SIG_DFL;
  if (hooks.handles_sigterm) {
    struct sigaction action{};
    action.sa_handler = on_sigterm;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
  }
  impl_->thread = std::thread([impl = impl_.get()] { impl->watch(); });
  impl_->guard = std::thread([impl = impl_.get()] { impl->guard_against_a_stuck_store(); });
}

FailureMonitor::~FailureMonitor() {
  if (!impl_) return;
  if (std::uncaught_exceptions() > 0)
    fail(Error("an exception ended this rank before it could be reported"));
  {
    std::lock_guard lock(impl_->mutex);
    impl_->leaving = true;
  }
  wake(hooks.wake_fd);
  impl_->thread.join();
  {
    std::lock_guard lock(impl_->mutex);
    impl_->left = true;
    impl_->changed.notify_all();
  }
  impl_->guard.join();
  if (hooks.handles_sigterm) sigaction(SIGTERM, &hooks.previous_sigterm, nullptr);
  std::set_terminate(hooks.previous_terminate);
  for (const WatchedProcess& neighbour : impl_->neighbours) close(neighbour.fd);
  close(hooks.wake_fd.exchange(-1));
  hooks.monitor = nullptr;
}

void FailureMonitor::set_timeout(double seconds) {
  if (impl_) impl_->timeout = seconds;
}

void FailureMonitor::when_failed(std::function<void(const JobFailure&)> callback) {
  if (!impl_) return;
  std::lock_guard lock(impl_->mutex);
  impl_->on_failure = std::move(callback);
}

int FailureMonitor::failure_exit_code() const {
  return exit_code(impl_ ? impl_->failure_of_job.load() : FailureClass::kRetry);
}

void FailureMonitor::progress() {
  if (impl_) impl_->work.fetch_add(1, std::memory_order_relaxed);
}

bool FailureMonitor::fail(const std::exception& error) {
  if (!impl_) return false;
  const auto* collective = dynamic_cast<const CollectiveError*>(&error);
  std::unique_lock lock(impl_->mutex);
  if (!impl_->failure)
    impl_->failure = LocalFailure{error.what(), collective != nullptr,
                                  collective ? collective->culprit : -1, failure_class(error)};
  wake(hooks.wake_fd);
  const auto patience = std::chrono::duration<double>(kVerdictSeconds + kStuckStoreSeconds);
  return impl_->changed.wait_for(lock, patience, [&] { return impl_->reported; });
}

}  // namespace megatron
