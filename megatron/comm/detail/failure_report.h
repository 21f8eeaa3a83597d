// From what every rank knows to one explanation: who failed first, and what the others were waiting
// for. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/base/failure_class.h"
#include "megatron/comm/collective_history.h"

namespace megatron {

// What one rank says of itself, or what its peers know of it when it no longer speaks.
struct RankState {
  enum class Condition { kRunning, kFailed, kGone, kSilent, kLeft };

  int rank = 0;
  std::string place;    // "tp 1 pp 2 dp 0"
  std::string process;  // "process 4711 on node3"
  Condition condition = Condition::kRunning;
  HistorySnapshot history;

  // kFailed
  std::string error;         // what was thrown
  bool consequence = false;  // a collective that failed because of a peer
  int culprit = -1;          // the rank that `error` is the fault of, when it says so
  int64_t order = 0;         // in which the ranks reported their failures
  FailureClass failure = FailureClass::kDoNotRetry;  // of `error`
  // kSilent
  double silent_seconds = 0;
  bool stopped = false;  // by a signal, as seen by a peer on the same machine
};

std::string to_json(const RankState& state);
RankState rank_state_from_json(const std::string& text);

struct FailureReport {
  int culprit = 0;
  // Lost, stuck and late ranks may do better in another start
  FailureClass failure = FailureClass::kRetry;
  std::string text;  // complete lines: "error: [rank 2, dp 2] ...\ndetail: ...\n"
};

// `states`: of every rank of the job.
FailureReport explain_failure(const std::vector<RankState>& states);

// The lines of an error of a rank: "error: [rank 2, dp 2] <first line>", and the others as details
// and hints.
std::string error_lines(const std::string& message, int rank, const std::string& place);

}  // namespace megatron
