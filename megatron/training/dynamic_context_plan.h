// Which ranks compute which documents when every document has a context width of its own. Pure
// arithmetic.
//
// A document of L tokens is cut over the fewest ranks, a power of two, that hold it with at most
// max_tokens each. Blocks of w ranks begin at multiples of w. Documents are placed from the widest
// to the narrowest, among equal ones from the one with most work to the one with least, each on the
// block that is free first: when a width's turn comes the ranks of each of its blocks have equal
// loads, so no rank waits inside a block, and where the ranks are a power of two the last one ends
// no later than total / ranks + the longest single pass.
//
// Every rank runs its documents in the order of the plan. That order is one for all ranks, so ranks
// that meet in several documents meet in the same order, and nobody waits in a circle.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

struct DynamicContextOptions {
  int64_t num_ranks = 1;
  int64_t max_tokens = 1;       // of one document on one rank
  double linear_work = 1.0;     // of a token, whatever the length
  double attention_work = 0.0;  // of a token for each token of its document
};

struct PlacedDocument {
  int64_t index = 0;  // in the given lengths
  int64_t first_rank = 0;
  int64_t width = 1;
  bool operator==(const PlacedDocument&) const = default;
};

struct DynamicContextPlan {
  std::vector<PlacedDocument> documents;  // in the order in which they are computed
  std::vector<double> load;               // by rank
  double longest = 0;                     // load of the fullest rank
};

// The ranks that a document needs: the smallest power of two that leaves at most max_tokens to
// each.
int64_t context_width(int64_t length, int64_t max_tokens);

// Every document once. Throws Error for one that is too long for the widest block of ranks.
DynamicContextPlan plan_dynamic_context(std::span<const int64_t> lengths,
                                        const DynamicContextOptions& options);

}  // namespace megatron
