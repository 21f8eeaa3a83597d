#include "megatron/distributed/bucket_sequence.h"

#include <utility>

namespace megatron {

BucketSequence::BucketSequence(std::vector<int> order, std::vector<std::vector<int>> members,
                               std::vector<int> uses)
    : order_(std::move(order)),
      members_(std::move(members)),
      uses_(std::move(uses)),
      bucket_of_(uses_.size(), -1),
      reports_(uses_.size(), 0),
      round_(members_.size(), 0),
      missing_(members_.size(), 0) {
  for (size_t bucket = 0; bucket < members_.size(); ++bucket) {
    for (int parameter : members_[bucket]) bucket_of_[parameter] = static_cast<int>(bucket);
  }
}

void BucketSequence::restart(int64_t rounds, int64_t passes) {
  rounds_ = rounds;
  passes_ = passes;
  reduced_ = 0;
  reports_.assign(reports_.size(), 0);
  for (size_t bucket = 0; bucket < members_.size(); ++bucket)
    count_missing(static_cast<int>(bucket), 0);
}

bool BucketSequence::report(int parameter) {
  const int bucket = bucket_of_[parameter];
  if (bucket < 0 || reports_[parameter] >= reports_due(parameter, rounds_ - 1)) return true;
  if (++reports_[parameter] == reports_due(parameter, round_[bucket])) --missing_[bucket];
  return false;
}

std::optional<int> BucketSequence::next_ready() {
  if (order_.empty() || round_of_next() >= rounds_) return std::nullopt;
  const int bucket = order_[reduced_ % static_cast<int64_t>(order_.size())];
  if (missing_[bucket] > 0) return std::nullopt;
  return advance();
}

std::optional<int> BucketSequence::next_left() {
  if (order_.empty() || round_of_next() >= rounds_) return std::nullopt;
  return advance();
}

int BucketSequence::advance() {
  const int bucket = order_[reduced_ % static_cast<int64_t>(order_.size())];
  ++reduced_;
  count_missing(bucket, round_[bucket] + 1);
  return bucket;
}

void BucketSequence::count_missing(int bucket, int64_t round) {
  round_[bucket] = round;
  missing_[bucket] = 0;
  for (int parameter : members_[bucket])
    missing_[bucket] += reports_[parameter] < reports_due(parameter, round);
}

}  // namespace megatron
