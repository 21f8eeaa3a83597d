// Drafts from the text itself: what followed the last time that it went on as it does now.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "megatron/scheduling/draft_source.h"

namespace megatron {

// The places of a text at which its last `least` ids occur, by chains of equal hash.
class RepeatedIds {
 public:
  // Matches of `least` to `most` ids count.
  RepeatedIds(int64_t least, int64_t most) : least_(least), most_(most) {}

  // Up to `count` ids that followed the longest match of the end of `ids`; of equally long ones the
  // last. `ids` are those of the last call with more behind them.
  std::vector<int32_t> continuation(const std::vector<int32_t>& ids, int64_t count);

 private:
  uint64_t key(const std::vector<int32_t>& ids, int64_t end) const;

  int64_t least_, most_;
  int64_t added_ = 0;                           // ids[0, added) have entries for their ends
  std::unordered_map<uint64_t, int32_t> last_;  // the last end of ids of a key
  std::vector<int32_t> before_;                 // by end: the one before of the same key; 0: none
};

class PromptLookup final : public DraftSource {
 public:
  PromptLookup(int64_t least, int64_t most) : least_(least), most_(most) {}
  void propose(std::span<DraftQuery> queries) override;
  void forget(const Sequence& sequence) override;

 private:
  int64_t least_, most_;
  std::map<std::pair<RequestId, int32_t>, RepeatedIds> texts_;
};

}  // namespace megatron
