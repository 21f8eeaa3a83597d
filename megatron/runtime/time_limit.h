// --exit-duration-in-mins: when to stop, so that the last checkpoint is on disk before the time is
// over.
#pragma once

namespace megatron {

// Fed by the training loop; not thread safe.
class TimeLimit {
 public:
  // `turns_to_stop`: how many turns of the loop pass between the decision to stop and the last one.
  TimeLimit(double limit_seconds, int turns_to_stop)
      : limit_(limit_seconds), turns_to_stop_(turns_to_stop) {}

  // A turn of the loop: an iteration with the evaluation and the checkpoint that fell due after it.
  // The first turn of a process, which also warms up, does not count.
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
