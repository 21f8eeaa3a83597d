// Which bucket of gradients is reduced next. Pure bookkeeping, without libtorch.
//
// Buckets are reduced round after round in one fixed order, so that every rank issues the same
// collectives whatever the order in which its gradients become ready, and whatever it never used.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace megatron {

class BucketSequence {
 public:
  // order: every bucket once, in the order of their reductions
  // members: by bucket, its parameters that are trained
  // uses: by parameter, how often one backward pass reports it
  BucketSequence(std::vector<int> order, std::vector<std::vector<int>> members,
                 std::vector<int> uses);

  // A step of `rounds` rounds begins; each round takes the reports of `passes` backward passes.
  void restart(int64_t rounds, int64_t passes);

  // One use of the parameter is complete. True: reported more often than the step allows, which is
  // the caller's bug.
  [[nodiscard]] bool report(int parameter);

  // The next bucket when every report of its round has come; it then counts as reduced.
  std::optional<int> next_ready();
  // The next bucket in any case; none when all rounds are over.
  std::optional<int> next_left();
  // Whether the bucket that was given last is not given again.
  bool in_last_round() const {
    return reduced_ > (rounds_ - 1) * static_cast<int64_t>(order_.size());
  }

 private:
  int64_t reports_due(int parameter, int64_t round) const {
    return uses_[parameter] * passes_ * (round + 1);
  }
  int64_t round_of_next() const { return reduced_ / static_cast<int64_t>(order_.size()); }
  int advance();
  void count_missing(int bucket, int64_t round);

  std::vector<int> order_;
  std::vector<std::vector<int>> members_;
  std::vector<int> uses_;
  std::vector<int> bucket_of_;    // by parameter; -1: never reported
  std::vector<int64_t> reports_;  // by parameter
  std::vector<int64_t> round_;    // by bucket: the round that it is filled for
  std::vector<int64_t> missing_;  // by bucket: members whose reports of that round are incomplete
  int64_t rounds_ = 0;
  int64_t passes_ = 1;
  int64_t reduced_ = 0;  // buckets, over all rounds
};

}  // namespace megatron
