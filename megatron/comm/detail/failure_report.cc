#include "megatron/comm/detail/failure_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveCall, op, dtype, count, bytes, group, channel, members,
                                   sequence, started, finished)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HistorySnapshot, now, under_way, finished, issued)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankState, rank, place, process, condition, history, error,
                                   consequence, culprit, order, failure)

namespace {

using Json = nlohmann::json;
using Condition = RankState::Condition;

constexpr size_t kMaxDetails = 8;

std::string seconds_text(double seconds) { return format_fixed(seconds, 1) + " s"; }

std::string ranks_text(const std::vector<int>& ranks) {
  const std::string list = group_text("", ranks);  // " {0, 1}"
  return (ranks.size() == 1 ? "rank " : "ranks ") + list.substr(2, list.size() - 3);
}

// The other side's channel of a message: its send and its receive are counted separately.
std::string other_side(const std::string& channel) {
  static const std::string kSent = " (sent)", kReceived = " (received)";
  if (channel.ends_with(kSent)) return channel.substr(0, channel.size() - kSent.size()) + kReceived;
  if (channel.ends_with(kReceived))
    return channel.substr(0, channel.size() - kReceived.size()) + kSent;
  return channel;
}

// Whether the rank of `state` has issued the call that another rank's `call` waits for.
bool has_called(const RankState& state, const CollectiveCall& call) {
  const auto issued = state.history.issued.find(other_side(call.channel));
  return issued != state.history.issued.end() && issued->second >= call.sequence;
}

class Explanation {
 public:
  explicit Explanation(const std::vector<RankState>& states) : states_(states) {
    for (const RankState& state : states) by_rank_[state.rank] = &state;
  }

  FailureReport make() {
    if (!failed(false) && !blamed() && !lost(Condition::kGone) && !lost(Condition::kSilent) &&
        !mismatch() && !waiting())
      failed(true);
    if (report_.text.empty()) report_.text = "error: a rank failed, but none reported why\n";
    add_waiting_ranks();
    if (!hint_.empty()) report_.text += "hint: " + hint_ + "\n";
    return report_;
  }

 private:
  void blame(const RankState& state, const std::string& message) {
    report_.culprit = state.rank;
    report_.text = error_lines(message, state.rank, state.place);
  }

  // The first rank that threw on its own, or, with `consequence`, because of a peer.
  bool failed(bool consequence) {
    const RankState* first = nullptr;
    for (const RankState& state : states_) {
      if (state.condition == Condition::kFailed && state.consequence == consequence &&
          (!first || state.order < first->order))
        first = &state;
    }
    if (first == nullptr) return false;
    blame(*first, first->error);
    if (!consequence) report_.failure = first->failure;
    return true;
  }

  // An error of a group that names a culprit: a call that differs from its peers'.
  bool blamed() {
    const RankState* first = nullptr;
    for (const RankState& state : states_) {
      if (state.condition == Condition::kFailed && by_rank_.contains(state.culprit) &&
          (!first || state.order < first->order))
        first = &state;
    }
    if (!first) return false;
    const RankState& culprit = *by_rank_.at(first->culprit);
    // The culprit's own condition says more
    if (culprit.condition == Condition::kGone || culprit.condition == Condition::kSilent)
      return false;
    blame(culprit, first->error);
    if (first->error.find("\nhint: ") != std::string::npos) {  // it did not arrive in time
      report_.failure = FailureClass::kRetry;
      return true;
    }
    report_.failure = FailureClass::kDoNotRetry;
    hint_ = "every rank of a group must make the same calls in the same order";
    return true;
  }

  bool lost(Condition condition) {
    for (const RankState& state : states_) {
      if (state.condition != condition) continue;
      if (condition == Condition::kGone) {
        blame(state, cat("is gone: ", state.process, " exited without a report"));
        hint_ = "it was killed (out of memory, kill -9) or crashed; see its log and the kernel's";
      } else if (state.stopped) {
        blame(state, cat("sent no heartbeat for ", seconds_text(state.silent_seconds), ": ",
                         state.process, " is stopped"));
        hint_ = "a signal (SIGSTOP) or a debugger stopped it";
      } else {
        blame(state, cat("sent no heartbeat for ", seconds_text(state.silent_seconds), ": ",
                         state.process, " does not answer"));
        hint_ = "its machine or its network may be gone";
      }
      add_last_call(state);
      return true;
    }
    return false;
  }

  // Ranks whose calls with the same sequence number differ, if the backend does not compare them.
  bool mismatch() {
    std::map<std::pair<std::string, int64_t>, std::map<std::string, std::vector<int>>> calls;
    for (const RankState& state : states_) {
      for (const CollectiveCall& call : state.history.under_way) {
        if (call.channel == other_side(call.channel))
          calls[{call.channel, call.sequence}]
               [call_text(call.op, call.count, call.dtype, call.bytes)]
                   .push_back(state.rank);
      }
    }
    for (const auto& [number, kinds] : calls) {
      if (kinds.size() < 2) continue;
      std::vector<std::pair<std::string, std::vector<int>>> sorted(kinds.begin(), kinds.end());
      std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
        return a.second.size() > b.second.size();
      });
      const RankState& culprit = *by_rank_.at(sorted[1].second.front());
      std::string text =
          cat("ranks of ", number.first, " made different calls as number ", number.second, ": ");
      for (size_t i = 0; i < sorted.size(); ++i)
        text += cat(i ? ", " : "", ranks_text(sorted[i].second), " ", sorted[i].first);
      blame(culprit, text);
      report_.failure = FailureClass::kDoNotRetry;
      hint_ = "every rank of a group must make the same calls in the same order";
      return true;
    }
    return false;
  }

  // Follows the call that has waited longest, along ranks that have not arrived, to a rank that
  // does not wait for another one.
  bool waiting() {
    const RankState* state = nullptr;
    const CollectiveCall* call = nullptr;
    for (const RankState& candidate : states_) {
      if (candidate.history.under_way.empty()) continue;
      const CollectiveCall& oldest = candidate.history.under_way.front();
      if (!call || age(candidate, oldest) > age(*state, *call)) {
        state = &candidate;
        call = &oldest;
      }
    }
    if (!call) return false;
    std::set<int> seen;
    while (seen.insert(state->rank).second) {
      const RankState* absent = nullptr;
      for (int member : call->members) {
        const auto other = by_rank_.find(member);
        if (other != by_rank_.end() && member != state->rank &&
            !has_called(*other->second, *call) &&
            (!absent || absent->history.under_way.size() > other->second->history.under_way.size()))
          absent = other->second;  // prefer a rank that waits for no other
      }
      if (!absent) {
        blame(*state,
              cat(to_string(*call), ": every rank has called it, but it has not finished after ",
                  seconds_text(age(*state, *call))));
        hint_ = "a device or the network between the ranks is stuck";
        return true;
      }
      if (absent->history.under_way.empty()) {
        blame(*absent,
              cat(absent->condition == Condition::kLeft ? "has finished without " : "did not call ",
                  to_string(*call), ", in which rank ", state->rank, " has waited for ",
                  seconds_text(age(*state, *call))));
        add_last_call(*absent);
        hint_ = cat("rank ", absent->rank, " is busy or stuck outside of any collective");
        return true;
      }
      state = absent;
      call = &absent->history.under_way.front();
    }
    blame(*state, cat("ranks wait for one another: this one in ", to_string(*call)));
    hint_ = "every rank of a group must make the same calls in the same order";
    return true;
  }

  static double age(const RankState& state, const CollectiveCall& call) {
    return state.history.now - call.started;
  }

  void add_last_call(const RankState& state) {
    if (state.history.finished.empty()) {
      report_.text += cat("detail: rank ", state.rank, " has finished no collective\n");
      return;
    }
    const CollectiveCall& last = state.history.finished.back();
    report_.text += cat("detail: rank ", state.rank, " last finished ", to_string(last), ", ",
                        seconds_text(state.history.now - last.finished), " before\n");
  }

  // What the other ranks were doing, one line per distinct call.
  void add_waiting_ranks() {
    std::vector<std::pair<std::string, std::vector<const RankState*>>> lines;
    for (const RankState& state : states_) {
      if (state.rank == report_.culprit || state.history.under_way.empty()) continue;
      const std::string text = to_string(state.history.under_way.front());
      auto line =
          std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return l.first == text; });
      if (line == lines.end()) line = lines.insert(lines.end(), {text, {}});
      line->second.push_back(&state);
    }
    for (size_t i = 0; i < lines.size() && i < kMaxDetails; ++i) {
      std::vector<int> ranks;
      double longest = 0;
      for (const RankState* state : lines[i].second) {
        ranks.push_back(state->rank);
        longest = std::max(longest, age(*state, state->history.under_way.front()));
      }
      report_.text += cat("detail: ", ranks_text(ranks), " waited in ", lines[i].first, ", for ",
                          seconds_text(longest), "\n");
    }
    if (lines.size() > kMaxDetails)
      report_.text += cat("detail: and ", lines.size() - kMaxDetails, " more\n");
  }

  const std::vector<RankState>& states_;
  std::map<int, const RankState*> by_rank_;
  FailureReport report_;
  std::string hint_;
};

}  // namespace

std::string to_json(const RankState& state) {
  return Json(state).dump(-1, ' ', false, Json::error_handler_t::replace);
}

RankState rank_state_from_json(const std::string& text) {
  try {
    return Json::parse(text).get<RankState>();
  } catch (const Json::exception& error) {
    throw_error(cat("the state of a rank cannot be parsed: ", error.what()));
  }
}

FailureReport explain_failure(const std::vector<RankState>& states) {
  return Explanation(states).make();
}

std::string error_lines(const std::string& message, int rank, const std::string& place) {
  std::istringstream in(message);
  std::string out;
  for (std::string line; std::getline(in, line);) {
    // libtorch appends its source location and stack frames, which do not help a user.
    if (line.starts_with("Exception raised from ")) break;
    if (line.empty()) continue;
    if (out.empty())
      out = cat("error: [rank ", rank, place.empty() ? "" : ", ", place, "] ", line, "\n");
    else
      out += cat(line.starts_with("detail: ") || line.starts_with("hint: ") ? "" : "detail: ", line,
                 "\n");
  }
  return out.empty() ? cat("error: [rank ", rank, place.empty() ? "" : ", ", place,
                           "] failed without a message\n")
                     : out;
}

}  // namespace megatron
