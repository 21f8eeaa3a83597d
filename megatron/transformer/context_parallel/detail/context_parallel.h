// The types of context parallelism; see transformer/context_parallel/context_parallel.h. Each takes
// a group of more than one rank whose ranks hold the zig-zag parts of one sequence, and derives
// token positions from the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/tensor/attention/attention.h"

namespace megatron {

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options, const at::Tensor& document_ids,
                          const ProcessGroup& cp);

at::Tensor all_gather_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionOptions& options, const at::Tensor& document_ids,
                                const ProcessGroup& cp);

// All-to-all over `a2a` that trades heads for tokens, then `attend` on [a s, b, n/a, d] tensors
// with the options of these heads, then the inverse all-to-all. `attend` sees the tokens of all
// ranks of the group in sequence order; with a hierarchy, those are this rank's zig-zag part in the
// outer group.
using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const AttentionOptions& options)>;
at::Tensor all_to_all_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionOptions& options, const ProcessGroup& a2a,
                                const Attend& attend);

// Why `heads` of one rank cannot be divided over `ranks`, with a hint, or "".
std::string why_heads_do_not_divide(int64_t heads, int64_t ranks);

// Parts of all c ranks [c, s/c, ...] <-> the sequence [s, ...] in sequence order.
at::Tensor join_zigzag(const at::Tensor& parts);
at::Tensor split_zigzag(const at::Tensor& sequence, int64_t c);

// Tensors in one contiguous buffer, to be sent as one message.
struct Packed {
  // Uninitialised, with the shapes of `like`.
  Packed(const std::vector<at::Tensor>& like, at::ScalarType type);
  // A copy of `tensors`.
  static Packed copy(const std::vector<at::Tensor>& tensors);
  at::Tensor flat;                // [total elements]
  std::vector<at::Tensor> parts;  // views of `flat`
};

// Non-tensor state that the backward needs; stored in autograd's context.
struct ContextParallelPass {
  AttentionOptions options;
  at::Tensor document_ids;
  ProcessGroup cp;

  // Whether masking or dropout depends on token positions, apart from the causal mask and its
  // window.
  bool by_place() const {
    return document_ids.defined() || options.mask.defined() || options.dropout > 0.0 ||
           has_two_sided_window();
  }
  // A window of attention that is not causal.
  bool has_two_sided_window() const {
    return !options.causal && (options.window_left >= 0 || options.window_right >= 0);
  }
  // Options for one block of queries and keys at these positions of the whole sequence (may be
  // undefined unless by_place()). `causal`: the last query and the last key are the same token.
  AttentionOptions block(bool causal, const at::Tensor& query_position,
                         const at::Tensor& key_position) const;
};

}  // namespace megatron
