// The kinds of TokenDispatch.
#pragma once

#include <optional>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/transformer/moe/dispatch_plan.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

// What all ranks know of the tokens of one micro-batch.
struct DispatchCounts {
  ExpertRanks ranks;
  DispatchPlan plan;
  int64_t most_tokens = 0;  // on one rank
  // With `flex`: of tokens that are sent once to each part of the experts, parts taken for experts
  std::optional<DispatchPlan> tokens = {};
};

// `order`: of this rank's choices by all experts. `by_part`: of parts_of_choices().
std::shared_ptr<TokenDispatch> dispatch_alltoall(ExpertOrder order, DispatchCounts counts,
                                                 const DispatchOptions& options,
                                                 const ExpertGroups& groups);
std::shared_ptr<TokenDispatch> dispatch_flex(const at::Tensor& choices, ExpertOrder order,
                                             const ExpertOrder& by_part, DispatchCounts counts,
                                             const DispatchOptions& options,
                                             const ExpertGroups& groups);
std::shared_ptr<TokenDispatch> dispatch_allgather(const at::Tensor& choices, DispatchCounts counts,
                                                  const DispatchOptions& options,
                                                  const ExpertGroups& groups);

// The columns whose rows a token sums: without those that only fill experts.
at::Tensor without_padding(const at::Tensor& of_choices, const DispatchOptions& options);

// The sum of as many equal parts of `rows`, in their order, in fp32 (fp64) and rounded once; a
// copy.
at::Tensor sum_of_parts(const at::Tensor& rows, int64_t parts);

// Whole numbers on the device of `like`.
at::Tensor on_device_of(const at::Tensor& like, const std::vector<int64_t>& numbers,
                        at::ScalarType type);

// The counts of a round; the rows on the device of `like`.
ExpertCounts counts_of(const DispatchRound& round, const at::Tensor& like);

}  // namespace megatron
