// --exit-duration-in-mins: when to stop so that the last checkpoint is on disk within the limit.
#pragma once

namespace megatron {

// Not thread safe.
class TimeLimit {
 public:
  // `turns_to_stop`: number of turns of the loop from the decision to stop to the last turn.
  TimeLimit(double limit_seconds, int turns_to_stop)
      : limit_(limit_seconds), turns_to_stop_(turns_to_stop) {}

  // Adds a turn of the loop: an iteration with the evaluation and checkpoint that follow it, if
  // any. The first turn of a process, which includes warm-up, is ignored.
  void add_turn(double seconds);
  double longest_turn() const { return longest_turn_; }

  // Whether another turn, and then a save of `save_seconds`, might end after the limit.
  bool reached(double elapsed_seconds, double save_seconds) const;

 private:
  double limit_;
  int turns_to_stop_;
  bool warmed_up_ = false;
  double longest_turn_ = 0;
};

}  // namespace megatron
