#include "megatron/training/dynamic_context/dynamic_context_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {

int64_t context_width(int64_t length, int64_t max_tokens) {
  MEGATRON_ASSERT(length >= 1 && max_tokens >= 1, length, " tokens with at most ", max_tokens,
                  " on a rank");
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>((length + max_tokens - 1) / max_tokens)));
}

DynamicContextPlan plan_dynamic_context(std::span<const int64_t> lengths,
                                        const DynamicContextOptions& options) {
  const int64_t widest =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(options.num_ranks)));
  DynamicContextPlan plan;
  plan.load.assign(static_cast<size_t>(options.num_ranks), 0.0);
  const auto work = [&](int64_t index) {  // work of each rank of the document's block
    const double length = static_cast<double>(lengths[static_cast<size_t>(index)]);
    return length * (options.linear_work + options.attention_work * length) /
           static_cast<double>(
               context_width(lengths[static_cast<size_t>(index)], options.max_tokens));
  };
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t width = context_width(lengths[i], options.max_tokens);
    MEGATRON_CHECK(width <= widest, "a document of ", lengths[i], " tokens needs ", width,
                   " ranks with ", options.max_tokens,
                   " tokens each, and the widest power of two among ", options.num_ranks, " is ",
                   widest, "\nhint: raise --max-seqlen-per-dp-cp-rank to ",
                   (lengths[i] + widest - 1) / widest);
    plan.documents.push_back({static_cast<int64_t>(i), 0, width});
  }
  std::sort(plan.documents.begin(), plan.documents.end(),
            [&](const PlacedDocument& a, const PlacedDocument& b) {
              if (a.width != b.width) return a.width > b.width;
              const double work_a = work(a.index), work_b = work(b.index);
              return work_a != work_b ? work_a > work_b : a.index < b.index;
            });
  for (PlacedDocument& document : plan.documents) {
    const auto free_at = [&](int64_t first) {
      const auto begin = plan.load.begin() + first;
      return *std::max_element(begin, begin + document.width);
    };
    for (int64_t first = document.width; first + document.width <= options.num_ranks;
         first += document.width)
      if (free_at(first) < free_at(document.first_rank)) document.first_rank = first;
    const double end = free_at(document.first_rank) + work(document.index);
    std::fill_n(plan.load.begin() + document.first_rank, document.width, end);
    plan.longest = std::max(plan.longest, end);
  }
  return plan;
}

}  // namespace megatron
