// The conjugate pairs of communication of tensor and sequence parallelism, differentiable. In a
// group of one rank each returns its input.
//
//   name                                            forward                backward
//   copy_to_tensor_model_parallel_region            identity               all-reduce
//   reduce_from_tensor_model_parallel_region        all-reduce             identity
//   gather_from_tensor_model_parallel_region        all-gather, last dim   own slice
//   scatter_to_sequence_parallel_region             own slice, dim 0       all-gather
//   gather_from_sequence_parallel_region            all-gather, dim 0      reduce-scatter
//   reduce_scatter_to_sequence_parallel_region      reduce-scatter, dim 0  all-gather
//   gather_rows_from_tensor_model_parallel_region   all-gather, dim 0      own slice
//   all_gather_last_dim_from_tensor_parallel_region all-gather, last dim   reduce-scatter
//
// Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3; Korthikanti et al. 2022
// (arXiv:2205.05198) section 4.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/process_group.h"

namespace megatron {

at::Tensor copy_to_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp);
at::Tensor reduce_from_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp);
at::Tensor gather_from_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp);
// For what every rank computes alike from the gathered rows.
at::Tensor gather_rows_from_tensor_model_parallel_region(const at::Tensor& x,
                                                         const ProcessGroup& tp);
at::Tensor all_gather_last_dim_from_tensor_parallel_region(const at::Tensor& x,
                                                           const ProcessGroup& tp);
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp);
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp);
// Uses the mailbox of the group if the rows fit into it; the mailbox may be null and must outlive
// the graph.
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp,
                                                      PeerMailbox* mailbox = nullptr);

// An uninitialised tensor for one rank's rows of x when dim 0 is split over the group.
at::Tensor empty_rows(const at::Tensor& x, const ProcessGroup& tp);

// The collectives of these functions, not differentiable. Dim 0 is split over the group.
at::Tensor all_gather_first_dim(const at::Tensor& x, const ProcessGroup& tp,
                                PeerMailbox* mailbox = nullptr);
at::Tensor reduce_scatter_first_dim(const at::Tensor& x, const ProcessGroup& tp,
                                    PeerMailbox* mailbox = nullptr);

// Splits a tensor that is equal on every rank of the group (--distribute-saved-activations): each
// rank keeps one of t equal parts of the flattened tensor, and calling the result returns the whole
// tensor. Not differentiable.
//
// Communication: none now; the call is an all-gather, which every rank of the group must make at
// the same point.
std::function<at::Tensor()> distribute_saved_activation(const at::Tensor& x,
                                                        const ProcessGroup& tp);

}  // namespace megatron
