// Assigns documents to ranks with dynamic context parallelism, where every document has its own
// context-parallel size ("width"). Pure arithmetic.
//
// A document of L tokens is split over the smallest power of two of ranks that leaves at most
// max_tokens to each. Blocks of w ranks begin at multiples of w. Documents are placed from the
// widest to the narrowest, among equal widths from most work to least, each on the block with the
// least load. When a width is placed, the ranks within each of its blocks have equal loads, so no
// rank waits inside a block; if the number of ranks is a power of two, the last rank ends no later
// than total / ranks + the longest single document.
//
// Every rank runs its documents in the order of the plan, which is the same on all ranks, so ranks
// that share several documents synchronise in the same order and cannot deadlock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

struct DynamicContextOptions {
  int64_t num_ranks = 1;
  int64_t max_tokens = 1;       // limit for one document on one rank
  double linear_work = 1.0;     // work per token, independent of the length
  double attention_work = 0.0;  // work per token, for each token of its document
};

struct PlacedDocument {
  int64_t index = 0;  // index into the given lengths
  int64_t first_rank = 0;
  int64_t width = 1;
  bool operator==(const PlacedDocument&) const = default;
};

struct DynamicContextPlan {
  std::vector<PlacedDocument> documents;  // in the order in which they are computed
  std::vector<double> load;               // by rank
  double longest = 0;                     // the largest load of a rank
};

// Number of ranks for a document: the smallest power of two that leaves at most max_tokens to each.
int64_t context_width(int64_t length, int64_t max_tokens);

// Places every document once. Throws Error for one that is too long for the widest block of ranks.
DynamicContextPlan plan_dynamic_context(std::span<const int64_t> lengths,
                                        const DynamicContextOptions& options);

}  // namespace megatron
