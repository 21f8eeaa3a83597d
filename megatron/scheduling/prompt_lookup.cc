#include "megatron/scheduling/prompt_lookup.h"

#include <xxhash.h>

#include <algorithm>

namespace megatron {
namespace {

// Of a chain; those before them are older.
constexpr int kMostLooked = 64;

}  // namespace

uint64_t RepeatedIds::key(const std::vector<int32_t>& ids, int64_t end) const {
  return XXH3_64bits(ids.data() + (end - least_), static_cast<size_t>(least_) * sizeof(int32_t));
}

std::vector<int32_t> RepeatedIds::continuation(const std::vector<int32_t>& ids, int64_t count) {
  const auto length = static_cast<int64_t>(ids.size());
  if (length <= least_) return {};
  before_.resize(static_cast<size_t>(length), 0);
  // An end in front of the text's own: something follows it.
  for (int64_t end = std::max(added_ + 1, least_); end < length; ++end) {
    int32_t& last = last_[key(ids, end)];
    before_[static_cast<size_t>(end)] = last;
    last = static_cast<int32_t>(end);
  }
  added_ = length - 1;
  const auto found = last_.find(key(ids, length));
  int64_t longest = least_ - 1, place = 0;
  int64_t end = found == last_.end() ? 0 : found->second;
  for (int looked = 0; end > 0 && looked < kMostLooked && longest < most_; ++looked) {
    int64_t equal = 0;
    while (equal < most_ && equal < end &&
           ids[static_cast<size_t>(end - equal - 1)] ==
               ids[static_cast<size_t>(length - equal - 1)])
      ++equal;
    if (equal > longest) {
      longest = equal;
      place = end;
    }
    end = before_[static_cast<size_t>(end)];
  }
  std::vector<int32_t> next;
  // Ids behind the end of the text are those that were guessed: the text repeats itself.
  for (int64_t i = place; place > 0 && i < place + count; ++i)
    next.push_back(i < length ? ids[static_cast<size_t>(i)]
                              : next[static_cast<size_t>(i - length)]);
  return next;
}

void PromptLookup::propose(std::span<DraftQuery> queries) {
  for (DraftQuery& query : queries) {
    const Sequence& sequence = *query.sequence;
    RepeatedIds& text =
        texts_.try_emplace({sequence.request, sequence.choice}, least_, most_).first->second;
    query.drafts = text.continuation(sequence.ids, query.most);
  }
}

void PromptLookup::forget(const Sequence& sequence) {
  texts_.erase({sequence.request, sequence.choice});
}

}  // namespace megatron
