// Combines what every rank knows into one explanation: which rank failed first, and what the others
// were waiting for. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/base/failure_class.h"
#include "megatron/comm/collective_history.h"

namespace megatron {

// What one rank reports about itself, or what its peers know about it if it no longer responds.
struct RankState {
  enum class Condition { kRunning, kFailed, kGone, kSilent, kLeft };

  int rank = 0;
  std::string place;    // "tp 1 pp 2 dp 0"
  std::string process;  // "process 4711 on node3"
  Condition condition = Condition::kRunning;
  HistorySnapshot history;

  // With kFailed:
  std::string error;         // what was thrown
  bool consequence = false;  // the error is a collective that failed because of a peer
  int culprit = -1;          // the rank that `error` blames, if any
  int64_t order = 0;         // order in which ranks reported their failures
  FailureClass failure = FailureClass::kDoNotRetry;  // class of `error`
  // With kSilent:
  double silent_seconds = 0;
  bool stopped = false;  // stopped by a signal, as seen by a peer on the same machine
};

std::string to_json(const RankState& state);
RankState rank_state_from_json(const std::string& text);

struct FailureReport {
  int culprit = 0;
  // Lost, stuck and late ranks may succeed after a restart
  FailureClass failure = FailureClass::kRetry;
  std::string text;  // complete lines: "error: [rank 2, dp 2] ...\ndetail: ...\n"
};

// `states`: one for every rank of the job.
FailureReport explain_failure(const std::vector<RankState>& states);

// Formats a rank's error: "error: [rank 2, dp 2] <first line>", with the other lines as details and
// hints.
std::string error_lines(const std::string& message, int rank, const std::string& place);

}  // namespace megatron
