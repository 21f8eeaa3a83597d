// All ranks of a model as the engine sees them: rank 0's runner, here, and those of the others.
//
// Rank 0 sends plans and transitions in one order; each rank executes them in that order and
// acknowledges transitions, and each step when it has ended. No time is sent.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/inference/rank_link.h"
#include "megatron/inference/step_runner.h"
#include "megatron/scheduling/clock.h"

namespace megatron {

struct RankFailure {
  int rank = 0;
  std::string message;
};

// What ranks do between two steps; null: nothing but to end all steps before it.
using RankTransition = std::optional<RunnerTransition>;

class RankGroup {
 public:
  // `links`: null: one rank. Both must live as long as this.
  RankGroup(StepRunner& runner, FollowerLinks* links, const Clock& clock);

  int size() const { return static_cast<int>(ranks_.size()); }

  // Waits until every other rank has said that it is ready with the same build, plan format and
  // facts. The failure of a rank, or that it did not come by `deadline_ns`; null: all are ready.
  std::optional<RankFailure> meet(int64_t deadline_ns, const std::string& build);

  void launch(const StepPlan& plan);
  // StepRunner::take of rank 0.
  std::optional<StepResult> take(int64_t wait_ns);

  // Begins a transition on `targets` (all: by rank). Acknowledgements of an earlier one that still
  // come are forgotten.
  void begin(const RankTransition& transition, const std::vector<bool>& targets);
  void begin(const RankTransition& transition) {
    begin(transition, std::vector<bool>(ranks_.size(), true));
  }
  // By rank: the outcome of the current transition: "" or why it failed; null: not known.
  const std::vector<std::optional<std::string>>& outcomes() const { return outcomes_; }
  bool settled() const;  // every target's outcome is known

  // Takes messages that have come, and the outcome of rank 0; waits for one up to `wait_ns`. A rank
  // that is lost or has failed; null: none. Also tells the others now and then that rank 0 lives.
  std::optional<RankFailure> poll(int64_t wait_ns);

  // The last step that each rank has ended, in words: "rank 1 has ended step 7".
  std::string progress() const;
  // The rank whose last ended step is the lowest; -1: several have that one.
  int slowest() const;
  // Tells the other ranks to leave, which is no failure from then on.
  void stop();

 private:
  struct Rank {
    int64_t ended = 0;
    bool ready = false;
  };
  std::optional<RankFailure> handle(const RankMessage& message);
  void poll_local(int64_t wait_ns);
  void send_to_all(std::string_view bytes);

  StepRunner& runner_;
  FollowerLinks* links_;
  const Clock& clock_;
  std::vector<Rank> ranks_;
  std::string expected_hello_;
  int64_t transition_ = 0;  // number of the current one
  std::vector<std::optional<std::string>> outcomes_;
  // Transitions of rank 0 with their numbers; the first one has begun if `local_began_`.
  std::deque<std::pair<int64_t, RankTransition>> local_;
  bool local_began_ = false;
  bool stopped_ = false;
  int64_t last_sent_ns_ = 0;
};

// One rank's part in what rank 0 decides.
class Follower {
 public:
  // Says hello to rank 0. Keeps references.
  Follower(LeaderLink& link, StepRunner& runner, const std::string& build);

  // Executes the next message of rank 0 or goes on with the current one; waits up to `wait_ns` for
  // either. False: rank 0 said stop. Throws what the link and the runner throw, and Error for a
  // plan that does not follow the one before.
  bool pump(int64_t wait_ns);
  void tell_failure(const std::string& message);
  int64_t heard() const { return heard_; }  // messages so far
  bool in_transition() const { return transition_.has_value(); }

 private:
  void execute(std::string_view bytes);
  void launch(std::string_view bytes);
  void take(int64_t wait_ns);
  void advance_transition(int64_t wait_ns);

  LeaderLink& link_;
  StepRunner& runner_;
  int64_t last_step_ = 0, in_flight_ = 0, heard_ = 0;
  uint64_t last_hash_ = 0;
  std::optional<RankTransition> transition_;  // the current one
  int64_t number_ = 0;                        // of it
  bool began_ = false, stopped_ = false;
};

struct FollowOptions {
  // Rank 0 tells that it lives every second; a rank that hears nothing for so long fails.
  int64_t silence_ns = 60'000'000'000;
  std::string build;  // of this program, compared with rank 0's
};

// The loop of a rank other than 0: pumps a Follower until rank 0 says stop. Throws Error when rank
// 0 is silent, and what the follower throws, after telling rank 0.
void follow(LeaderLink& link, StepRunner& runner, const Clock& clock, const FollowOptions& options);

}  // namespace megatron
