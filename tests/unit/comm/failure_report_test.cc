#include "megatron/comm/detail/failure_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Condition = RankState::Condition;
using testing::HasSubstr;
using testing::StartsWith;

// An all_reduce of `count` over ranks 0..3, made two seconds before `now`.
CollectiveCall call(int64_t sequence, int64_t count = 8, const std::string& op = "all_reduce") {
  CollectiveCall call;
  call.op = op;
  call.dtype = "F32";
  call.count = count;
  call.bytes = 4 * count;
  call.group = call.channel = "dp {0, 1, 2, 3}";
  call.members = {0, 1, 2, 3};
  call.sequence = sequence;
  call.started = 98;
  return call;
}

// Four ranks that wait in call 7, all but `absent`, which has finished 6.
std::vector<RankState> waiting_ranks(int absent) {
  std::vector<RankState> states(4);
  for (int rank = 0; rank < 4; ++rank) {
    states[rank].rank = rank;
    states[rank].place = cat("dp ", rank);
    states[rank].process = cat("process ", 100 + rank, " on here");
    states[rank].history.now = 100;
    states[rank].history.issued = {{"dp {0, 1, 2, 3}", rank == absent ? 6 : 7}};
    if (rank != absent) states[rank].history.under_way = {call(7)};
    CollectiveCall last = call(6);
    last.finished = 97.5;
    states[rank].history.finished = {last};
  }
  return states;
}

TEST(FailureReport, NamesTheRankThatDidNotCome) {
  const FailureReport report = explain_failure(waiting_ranks(2));
  EXPECT_EQ(report.culprit, 2);
  EXPECT_EQ(report.text,
            "error: [rank 2, dp 2] did not call all_reduce of 8 x F32 (32 B) over dp {0, 1, 2, 3}, "
            "number 7, in which rank 0 has "
            "waited for 2.0 s\n"
            "detail: rank 2 last finished all_reduce of 8 x F32 (32 B) over dp {0, 1, 2, 3}, "
            "number 6, 2.5 s before\n"
            "detail: ranks 0, 1, 3 waited in all_reduce of 8 x F32 (32 B) over dp {0, 1, 2, 3}, "
            "number 7, for 2.0 s\n"
            "hint: rank 2 is busy or stuck outside of any collective\n");
}

TEST(FailureReport, TheFirstErrorCountsAndConsequencesDoNot) {
  std::vector<RankState> states = waiting_ranks(2);
  for (int rank : {0, 1, 3}) {
    states[rank].condition = Condition::kFailed;
    states[rank].error = "all_reduce failed: connection closed";
    states[rank].consequence = true;
    states[rank].order = rank + 1;
  }
  states[2].condition = Condition::kFailed;
  states[2].error =
      "the disk is full\nhint: delete something\nsecond line\nException raised from x\nframe";
  states[2].order = 9;
  FailureReport report = explain_failure(states);
  EXPECT_EQ(report.culprit, 2);
  EXPECT_THAT(
      report.text,
      StartsWith(
          "error: [rank 2, dp 2] the disk is full\nhint: delete something\ndetail: second line\n"
          "detail: ranks 0, 1, 3 waited in "));
  EXPECT_THAT(report.text, testing::Not(HasSubstr("connection closed")));
  // Of two errors the earlier one.
  states[1].consequence = false;
  EXPECT_EQ(explain_failure(states).culprit, 1);
}

TEST(FailureReport, ADeadRankExplainsTheErrorsOfItsPeers) {
  std::vector<RankState> states = waiting_ranks(2);
  states[0].condition = Condition::kFailed;
  states[0].consequence = true;
  states[0].error = "connection closed";
  states[2].condition = Condition::kGone;
  EXPECT_THAT(
      explain_failure(states).text,
      StartsWith("error: [rank 2, dp 2] is gone: process 102 on here exited without a report\n"
                 "detail: rank 2 last finished "));
  states[2].condition = Condition::kSilent;
  states[2].silent_seconds = 5.25;
  EXPECT_THAT(explain_failure(states).text,
              StartsWith("error: [rank 2, dp 2] sent no heartbeat for 5.2 s: process 102 on "
                         "here does not answer\n"));
  states[2].stopped = true;
  EXPECT_THAT(explain_failure(states).text, HasSubstr("process 102 on here is stopped\n"));
}

TEST(FailureReport, OnlyConsequencesAreBetterThanNothing) {
  std::vector<RankState> states(2);
  states[1].rank = 1;
  states[1].condition = Condition::kFailed;
  states[1].consequence = true;
  states[1].error = "connection refused";
  EXPECT_EQ(explain_failure(states).text, "error: [rank 1] connection refused\n");
}

TEST(FailureReport, DifferentCallsOfOneNumber) {
  std::vector<RankState> states = waiting_ranks(-1);
  states[3].history.under_way = {call(7, 9)};
  FailureReport report = explain_failure(states);
  EXPECT_EQ(report.culprit, 3);
  EXPECT_THAT(report.text,
              StartsWith("error: [rank 3, dp 3] ranks of dp {0, 1, 2, 3} made different calls as "
                         "number 7: ranks 0, 1, 2 "
                         "all_reduce of 8 x F32 (32 B), rank 3 all_reduce of 9 x F32 (36 B)\n"));
  // A group that compares by itself throws on all its ranks and names the culprit.
  states = waiting_ranks(-1);
  for (RankState& state : states) {
    state.condition = Condition::kFailed;
    state.consequence = true;
    state.culprit = 1;
    state.error = "made different calls";
    state.order = state.rank;
  }
  EXPECT_THAT(explain_failure(states).text,
              StartsWith("error: [rank 1, dp 1] made different calls\n"));
}

TEST(FailureReport, FollowsTheRanksThatWaitToTheOneThatDoesNot) {
  // Rank 0 waits for 1 in a collective, 1 for a message of 2, 2 for a message of 3; 3 does
  // something else.
  std::vector<RankState> states(4);
  for (int rank = 0; rank < 4; ++rank) {
    states[rank].rank = rank;
    states[rank].history.now = 100;
  }
  CollectiveCall pair = call(1);
  pair.group = pair.channel = "tp {0, 1}";
  pair.members = {0, 1};
  pair.started = 90;
  states[0].history.under_way = {pair};
  for (int rank : {1, 2}) {
    CollectiveCall message = call(1, 8, cat("recv from rank ", rank + 1, " to rank ", rank));
    message.members = {rank + 1, rank};
    message.channel = cat("world from ", rank + 1, " to ", rank, " (received)");
    states[rank].history.under_way = {message};
    states[rank].history.issued = {{message.channel, 1}};
  }
  EXPECT_THAT(
      explain_failure(states).text,
      StartsWith(
          "error: [rank 3] did not call recv from rank 3 to rank 2 of 8 x F32 (32 B) over "));
  // Had rank 3 sent the message, the network would be to blame.
  states[3].history.issued = {{"world from 3 to 2 (sent)", 1}};
  EXPECT_THAT(explain_failure(states).text,
              StartsWith("error: [rank 2] recv from rank 3 to rank 2"));
  EXPECT_THAT(explain_failure(states).text,
              HasSubstr("every rank has called it, but it has not finished after 2.0 s"));
}

TEST(FailureReport, RanksThatWaitForOneAnother) {
  std::vector<RankState> states(2);
  for (int rank = 0; rank < 2; ++rank) {
    states[rank].rank = rank;
    states[rank].history.now = 100;
    CollectiveCall mine = call(1);
    mine.members = {0, 1};
    mine.group = mine.channel = rank == 0 ? "tp {0, 1}" : "dp {0, 1}";
    states[rank].history.under_way = {mine};
    states[rank].history.issued = {{mine.channel, 1}};
  }
  EXPECT_THAT(
      explain_failure(states).text,
      HasSubstr(
          "ranks wait for one another: this one in all_reduce of 8 x F32 (32 B) over tp {0, 1}"));
}

TEST(FailureReport, StatesTravelAsText) {
  RankState state = waiting_ranks(2)[0];
  state.condition = Condition::kFailed;
  state.error = "broken \xff text";
  state.consequence = true;
  state.culprit = 3;
  state.order = 5;
  const RankState back = rank_state_from_json(to_json(state));
  EXPECT_EQ(back.place, "dp 0");
  EXPECT_EQ(back.process, state.process);
  EXPECT_EQ(back.condition, Condition::kFailed);
  EXPECT_THAT(back.error, StartsWith("broken "));
  EXPECT_TRUE(back.consequence);
  EXPECT_EQ(back.culprit, 3);
  EXPECT_EQ(back.order, 5);
  EXPECT_EQ(back.history.issued, state.history.issued);
  ASSERT_EQ(back.history.under_way.size(), 1u);
  EXPECT_EQ(to_string(back.history.under_way[0]), to_string(state.history.under_way[0]));
  EXPECT_EQ(back.history.finished.size(), 1u);
  EXPECT_THROW(rank_state_from_json("{\"rank\": 1}"), Error);
}

TEST(FailureReport, WhatIsThrownSaysWhetherToTryAgain) {
  std::vector<RankState> states = waiting_ranks(2);
  states[2].condition = Condition::kFailed;
  for (const FailureClass failure : {FailureClass::kDoNotRetry, FailureClass::kRetry,
                                     FailureClass::kUsage, FailureClass::kInternal}) {
    states[2].failure = failure;
    EXPECT_EQ(
        explain_failure({rank_state_from_json(to_json(states[2])), states[0], states[1], states[3]})
            .failure,
        failure);
  }
}

TEST(FailureReport, LostAndLateRanksMayBeTriedAgainButNotOtherCalls) {
  EXPECT_EQ(explain_failure(waiting_ranks(2)).failure, FailureClass::kRetry);
  for (const Condition condition : {Condition::kGone, Condition::kSilent}) {
    std::vector<RankState> states = waiting_ranks(2);
    states[2].condition = condition;
    states[0].condition = Condition::kFailed;
    states[0].consequence = true;
    EXPECT_EQ(explain_failure(states).failure, FailureClass::kRetry);
  }
  std::vector<RankState> broken(1);  // a connection, and nothing else is known
  broken[0].condition = Condition::kFailed;
  broken[0].consequence = true;
  EXPECT_EQ(explain_failure(broken).failure, FailureClass::kRetry);
  std::vector<RankState> different = waiting_ranks(-1);
  different[3].history.under_way = {call(7, 9)};
  EXPECT_EQ(explain_failure(different).failure, FailureClass::kDoNotRetry);
  broken.resize(2);
  broken[1].rank = 1;
  broken[0].culprit = 1;
  EXPECT_EQ(explain_failure(broken).failure, FailureClass::kDoNotRetry);
}

TEST(FailureReport, LongListsAreCut) {
  std::vector<int> members(100);
  for (int i = 0; i < 100; ++i) members[i] = i;
  EXPECT_EQ(group_text("dp", members), "dp {0, 1, 2, 3, ... 92 more ..., 96, 97, 98, 99}");
  EXPECT_EQ(group_text("tp", {4}), "tp {4}");
}

}  // namespace
}  // namespace megatron
