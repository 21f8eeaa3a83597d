// Drafts of the fake model: what a request gives alone, with mistakes.
#pragma once

#include <map>
#include <random>

#include "fake_model.h"
#include "megatron/scheduling/draft_source.h"

namespace megatron {

class FakeDrafts final : public DraftSource {
 public:
  // One in `mistakes` drafts is wrong.
  FakeDrafts(const FakeOptions& options, uint32_t seed, uint32_t mistakes)
      : options_(options), random_(seed), mistakes_(mistakes) {}

  void propose(std::span<DraftQuery> queries) override {
    for (DraftQuery& query : queries) {
      const Sequence& sequence = *query.sequence;
      const auto key = std::pair(sequence.request, sequence.choice);
      auto found = alone_.find(key);
      if (found == alone_.end())
        found =
            alone_.emplace(key, run_alone(options_, sequence.spec(), sequence.choice).ids).first;
      for (int64_t i = sequence.outputs(); std::ssize(query.drafts) < query.most; ++i) {
        const bool wrong = i >= std::ssize(found->second) || random_() % mistakes_ == 0;
        query.drafts.push_back(wrong ? static_cast<int32_t>(random_() % 250)
                                     : found->second[static_cast<size_t>(i)]);
      }
    }
  }
  void forget(const Sequence& sequence) override {
    alone_.erase({sequence.request, sequence.choice});
    ++forgotten;
  }
  bool empty() const { return alone_.empty(); }

  int forgotten = 0;

 private:
  FakeOptions options_;
  std::mt19937 random_;
  uint32_t mistakes_;
  std::map<std::pair<RequestId, int32_t>, std::vector<int32_t>> alone_;
};

}  // namespace megatron
