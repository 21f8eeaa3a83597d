// What this rank has called on its groups: the calls under way and the last finished ones, for
// messages when a job fails.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// One call of one verb. Calls of different ranks belong together when `channel` and `sequence`
// agree.
struct CollectiveCall {
  // "all_reduce"; with what must agree besides size and type: "broadcast from 2"
  std::string op;
  std::string dtype;  // "F32"; empty for a barrier
  int64_t count = 0;  // elements
  int64_t bytes = 0;
  std::string group;         // "tp {4, 5}"
  std::string channel;       // the group, or for a message the group and both ranks
  std::vector<int> members;  // ranks of the job that take part
  int64_t sequence = 0;      // from 1 in each channel
  double started = 0;        // seconds on a clock of this rank
  double finished = 0;       // 0: under way
};

// "all_reduce of 1048576 x F32 (4 MiB)"
std::string call_text(const std::string& op, int64_t count, const std::string& dtype,
                      int64_t bytes);
// With group and sequence: "... over tp {4, 5}, number 12"
std::string to_string(const CollectiveCall& call);

// "tp {4, 5}"; long lists are cut in the middle.
std::string group_text(const std::string& name, const std::vector<int>& members);

struct HistorySnapshot {
  double now = 0;
  std::vector<CollectiveCall> under_way;  // oldest first
  std::vector<CollectiveCall> finished;   // the last ones, oldest first
  std::map<std::string, int64_t> issued;  // calls made in each channel
};

// Thread safe.
class CollectiveHistory {
 public:
  // `keep`: how many finished calls are remembered.
  explicit CollectiveHistory(size_t keep = 32) : keep_(keep) {}

  int64_t begin(CollectiveCall call);  // sets sequence and started; returns an id
  // What tells when the call is over; null: it is over.
  void issued(int64_t id, std::shared_ptr<const Progress> progress);
  HistorySnapshot snapshot();
  // Seconds since the oldest call under way was made; 0 when there is none.
  double oldest_age();

 private:
  struct Entry {
    CollectiveCall call;
    std::shared_ptr<const Progress> progress;
  };
  void settle(double now);

  const size_t keep_;
  std::mutex mutex_;
  int64_t next_id_ = 0;
  std::map<int64_t, Entry> under_way_;
  std::deque<CollectiveCall> finished_;
  std::map<std::string, int64_t> issued_;
};

// The same backend and all subgroups made from it, with every call written into `history`.
std::shared_ptr<Backend> record_calls(std::shared_ptr<Backend> world,
                                      std::shared_ptr<CollectiveHistory> history);

}  // namespace megatron
