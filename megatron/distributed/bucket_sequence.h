// Which bucket of gradients is reduced next. Pure bookkeeping, without libtorch.
//
// Buckets are reduced in rounds, in one fixed order, so that every rank issues the same
// collectives, no matter in which order its gradients become ready or which parameters it did not
// use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace megatron {

class BucketSequence {
 public:
  // order: every bucket once, in the order of their reductions
  // members: by bucket, its trained parameters
  // uses: by parameter, how many times one backward pass reports it
  BucketSequence(std::vector<int> order, std::vector<std::vector<int>> members,
                 std::vector<int> uses);

  // Starts a step of `rounds` rounds, each of which takes the reports of `passes` backward passes.
  void restart(int64_t rounds, int64_t passes);

  // Reports one gradient of the parameter. Returns true if that is more than the step allows, a bug
  // of the caller.
  [[nodiscard]] bool report(int parameter);

  // The next bucket if all reports of its round have arrived; it then counts as reduced.
  std::optional<int> next_ready();
  // The next bucket, complete or not; nullopt when all rounds are over.
  std::optional<int> next_left();
  // Whether the bucket returned last has no further round.
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
  std::vector<int64_t> round_;    // by bucket: the round being filled
  std::vector<int64_t> missing_;  // by bucket: members with reports missing in that round
  int64_t rounds_ = 0;
  int64_t passes_ = 1;
  int64_t reduced_ = 0;  // number of reduced buckets, over all rounds
};

}  // namespace megatron
