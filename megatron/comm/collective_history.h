// The collectives that this rank has issued on its groups: those in flight and the last finished
// ones, for the report when a job fails.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// One collective or message. Calls of different ranks belong together if `channel` and `sequence`
// are equal.
struct CollectiveCall {
  // "all_reduce", or with the arguments that must agree besides size and type: "broadcast from 2"
  std::string op;
  std::string dtype;  // "F32"; empty for a barrier
  int64_t count = 0;  // elements
  int64_t bytes = 0;
  std::string group;         // "tp {4, 5}"
  std::string channel;       // the group; for a message, the group and both ranks
  std::vector<int> members;  // ranks of the job that take part
  int64_t sequence = 0;      // counted from 1 in each channel
  double started = 0;        // seconds on this rank's clock
  double finished = 0;       // 0: in flight
};

// "all_reduce of 1048576 x F32 (4 MiB)"
std::string call_text(const std::string& op, int64_t count, const std::string& dtype,
                      int64_t bytes);
// With group and sequence: "... over tp {4, 5}, number 12"
std::string to_string(const CollectiveCall& call);

// "tp {4, 5}"; long lists are shortened in the middle.
std::string group_text(const std::string& name, const std::vector<int>& members);

struct HistorySnapshot {
  double now = 0;
  std::vector<CollectiveCall> under_way;  // in flight, oldest first
  std::vector<CollectiveCall> finished;   // the last ones, oldest first
  std::map<std::string, int64_t> issued;  // calls made in each channel
};

// Thread safe. Whether calls have finished is found out by a thread of its own: the driver of a GPU
// may hold up whoever asks for as long as another thread waits in it for a rank that is lost.
class CollectiveHistory {
 public:
  // `keep`: number of finished calls to keep.
  explicit CollectiveHistory(size_t keep = 32);
  ~CollectiveHistory();
  CollectiveHistory(const CollectiveHistory&) = delete;
  CollectiveHistory& operator=(const CollectiveHistory&) = delete;

  int64_t begin(CollectiveCall call);  // sets sequence and started; returns an id
  // `progress` tells when the call has finished; null: it has.
  void issued(int64_t id, std::shared_ptr<const Progress> progress);
  // Calls count as in flight until it is known that they have finished; both return within a
  // fraction of a second.
  HistorySnapshot snapshot();
  // Seconds since the oldest call in flight was issued; 0 if there is none.
  double oldest_age();

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread's, too
};

// Wraps a backend and all subgroups made from it: every call is recorded in `history`.
std::shared_ptr<Backend> record_calls(std::shared_ptr<Backend> world,
                                      std::shared_ptr<CollectiveHistory> history);

}  // namespace megatron
