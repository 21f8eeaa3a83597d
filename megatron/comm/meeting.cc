#include "megatron/comm/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <sstream>
#include <thread>

#include "megatron/base/exit_codes.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/process.h"
#include "megatron/comm/detail/machine_id.h"

namespace megatron {
namespace {

using Clock = std::chrono::steady_clock;

// Values of the key "start", which the first claim decides.
// Followed by the exit code
constexpr std::string_view kGo = "go", kDiffer = "differ", kStop = "stop ";

// How long the store's host waits for ranks that still have to read why they must exit
constexpr double kFarewellSeconds = 5;

class Meeting {
 public:
  Meeting(const Launch& launch, Store& store, const RankSettings& settings, double timeout_seconds)
      : launch_(launch),
        store_(store),
        settings_(settings),
        timeout_seconds_(timeout_seconds),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(timeout_seconds))),
        digest_(digest(settings)) {}

  std::vector<Neighbour> run() {
    arrive();
    const std::string start = wait_for_start();
    if (start == kDiffer) leave_with_differences();
    if (start != kGo) leave_quietly(start);
    return neighbours();
  }

 private:
  double seconds_left() const {
    return std::chrono::duration<double>(deadline_ - Clock::now()).count();
  }

  void arrive() {
    // Before anything that makes another rank refuse: the store's host waits for those counted
    // here.
    store_.add("entered", 1);
    entered_ = true;
    const std::string size = store_.claim("world_size", cat(launch_.world_size, " ", launch_.rank));
    int others_size = 0, other = 0;
    std::istringstream(size) >> others_size >> other;
    if (others_size != launch_.world_size)
      refuse(kExitFailure, cat("rank ", launch_.rank, " was started as one of ", launch_.world_size,
                               " ranks, but rank ", other, " as one of ", others_size,
                               "\nhint: WORLD_SIZE must be the same for every rank"));
    const std::string process = cat("process ", getpid(), " on ", machine_name());
    const std::string mine = cat(digest_, " ", process);
    const std::string present = store_.claim(cat("place/", launch_.rank), mine);
    if (present != mine)
      refuse(kExitFailure,
             cat("rank ", launch_.rank, " was started twice: as ",
                 present.substr(digest_.size() + 1), " and as ", process,
                 "\nhint: every process needs its own RANK, and every job its own MASTER_PORT on "
                 "the machine of rank 0"));
    store_.append(machine_, cat(launch_.rank, " ", getpid(), "\n"));
    first_of_digest_ = store_.add("settings/" + digest_, 1) == 1;
    if (store_.add("here", 1) < launch_.world_size) return;
    const bool alike = store_.add("settings/" + digest_, 0) == launch_.world_size;
    store_.claim("start", std::string(alike ? kGo : kDiffer));
  }

  // The value of "start", for which the store is waited on without polling. At the deadline the
  // first rank to claim the key is the one to name the missing ranks.
  std::string wait_for_start() {
    try {
      if (seconds_left() > 0) return store_.wait("start", seconds_left());
    } catch (const Error&) {
      if (seconds_left() > 0.5)  // not the deadline
        throw RetryError(cat("the store was lost before all ranks had arrived: ",
                             launch_.store_is_hosted ? "the launcher's agent" : "rank 0",
                             ", which held it, has ended\nhint: see its output"));
    }
    std::vector<int> missing;
    for (int rank = 0; rank < launch_.world_size; ++rank)
      if (!store_.find(cat("place/", rank))) missing.push_back(rank);
    if (missing.empty()) return store_.wait("start", 5);
    refuse(kExitRetry, cat("after ", std::llround(std::ceil(timeout_seconds_)), " s, ",
                           rank_list(missing), " of ", launch_.world_size, " ranks ",
                           missing.size() == 1 ? "has" : "have", " not started",
                           "\nhint: see their output; --distributed-timeout-minutes waits longer"));
  }

  // This rank refuses the start for a reason that it reports, unless another rank did so first or
  // the job runs without it.
  [[noreturn]] void refuse(int code, const std::string& message) {
    const std::string mine = cat(kStop, code, " rank ", launch_.rank, " ", getpid());
    const std::string start = store_.claim("start", mine);
    if (start != mine && start != kGo) leave_quietly(start);
    farewell();
    if (code == kExitRetry) throw RetryError(message);
    throw Error(message);
  }

  [[noreturn]] void leave_quietly(const std::string& start) {
    int code = start == kDiffer ? kExitUsage : kExitFailure;
    if (start.starts_with(kStop)) std::istringstream(start.substr(kStop.size())) >> code;
    farewell();
    throw StartRefused(code);
  }

  [[noreturn]] void leave_with_differences() {
    if (first_of_digest_) store_.set("text/" + digest_, pack_settings(settings_));
    if (launch_.rank != 0) leave_quietly(std::string(kDiffer));
    const std::string message = describe_differences(groups());
    farewell();
    throw UsageError(message);
  }

  // The settings of all ranks, grouped; on rank 0.
  std::vector<SettingsGroup> groups() {
    std::map<std::string, SettingsGroup> by_digest;
    for (int rank = 0; rank < launch_.world_size; ++rank) {
      const std::string place = store_.find(cat("place/", rank)).value_or("");
      by_digest[place.substr(0, digest_.size())].ranks.push_back(rank);
    }
    std::vector<SettingsGroup> groups;
    for (auto& [digest, group] : by_digest) {
      group.settings =
          unpack_settings(store_.wait("text/" + digest, std::clamp(seconds_left(), 5.0, 60.0)));
      groups.push_back(std::move(group));
    }
    return groups;
  }

  // The store's host stays until all ranks that have entered have read why they must exit.
  void farewell() {
    try {
      if (launch_.rank != 0 || launch_.store_is_hosted) {
        if (entered_) store_.add("left", 1);
        return;
      }
      const auto until = Clock::now() + std::chrono::duration<double>(kFarewellSeconds);
      for (auto pause = std::chrono::milliseconds(1); Clock::now() < until;
           pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
        if (store_.add("left", 0) + (entered_ ? 1 : 0) >= store_.add("entered", 0)) return;
        std::this_thread::sleep_for(pause);
      }
    } catch (const Error&) {  // the store is gone already
    }
  }

  std::vector<Neighbour> neighbours() {
    std::vector<Neighbour> neighbours;
    std::istringstream ranks(store_.find(machine_).value_or(""));
    for (Neighbour neighbour; ranks >> neighbour.rank >> neighbour.pid;)
      if (neighbour.rank != launch_.rank) neighbours.push_back(neighbour);
    return neighbours;
  }

  const Launch& launch_;
  Store& store_;
  const RankSettings& settings_;
  const double timeout_seconds_;
  const Clock::time_point deadline_;
  const std::string digest_;
  const std::string machine_ = "machine/" + machine_id();
  bool first_of_digest_ = false;
  bool entered_ = false;  // counted in the key "entered"
};

}  // namespace

std::vector<Neighbour> meet(const Launch& launch, Store& store, const RankSettings& settings,
                            double timeout_seconds) {
  return Meeting(launch, store, settings, timeout_seconds).run();
}

void wait_until_all_left(Store& store, int world_size, double timeout_seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(timeout_seconds);
  while (store.add("left", 0) + store.add("called off", 0) < world_size && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

bool call_off(Store& store, int exit_code) {
  const std::string mine = cat(kStop, exit_code, " process ", getpid());
  const bool first = store.claim("start", mine) == mine;
  store.add("called off", 1);
  return first;
}

}  // namespace megatron
