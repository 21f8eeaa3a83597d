// The kinds of TokenDispatch.
#pragma once

#include "megatron/transformer/moe/dispatch_plan.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

// What all ranks know of the tokens of one micro-batch.
struct DispatchCounts {
  ExpertRanks ranks;
  DispatchPlan plan;
  int64_t most_tokens = 0;  // on one rank
};

std::shared_ptr<TokenDispatch> dispatch_alltoall(const at::Tensor& choices, DispatchCounts counts,
                                                 const DispatchOptions& options,
                                                 const ExpertGroups& groups);
std::shared_ptr<TokenDispatch> dispatch_allgather(const at::Tensor& choices, DispatchCounts counts,
                                                  const DispatchOptions& options,
                                                  const ExpertGroups& groups);

// Whole numbers on the device of `like`.
at::Tensor on_device_of(const at::Tensor& like, const std::vector<int64_t>& numbers,
                        at::ScalarType type);

// The counts of a round; the rows on the device of `like`.
ExpertCounts counts_of(const DispatchRound& round, const at::Tensor& like);

}  // namespace megatron
