#include "megatron/tensor/attention/ordered_attention.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/attention/ordered_attention.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/detail/paged_rows.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

bool knows([[maybe_unused]] const OrderedAttention& args) {
#ifdef MEGATRON_CUDA
  return has_ordered_attention(args);
#else
  return false;
#endif
}

std::string why_not_options(const AttentionOptions& o) {
  if (!o.causal) return "it is not causal";
  if (o.dropout > 0.0) return "attention dropout is drawn for the whole of the scores";
  if (o.mask.defined()) return "on GPUs it knows no borders of documents";
  if (o.sinks.defined()) return "on GPUs it knows no sinks";
  if (o.distance_bias.defined()) return "relative positions are added to the scores";
  return "";
}

// What does not depend on where queries and keys lie.
OrderedAttention arguments(const at::Tensor& q, int64_t groups, const AttentionOptions& o) {
  OrderedAttention args;
  args.dtype = to_dtype(q.scalar_type());
  args.heads = q.size(2);
  args.groups = groups;
  args.size = q.size(3);
  args.scale = o.scale;
  args.softcap = o.softcap;
  args.window_left = o.window_left;
  return args;
}

// Keys [s_k, b, g, d]: a block of s_k positions for each sample.
PagedPool pool_of_samples(const at::Tensor& keys) {
  return {keys.const_data_ptr(), keys.stride(1), keys.stride(0), keys.stride(2), nullptr};
}

OrderedAttention trained(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const AttentionOptions& o) {
  OrderedAttention args = arguments(q, k.size(2), o);
  args.query = q.const_data_ptr();
  args.query_row = q.stride(0);
  args.query_part = q.stride(1);
  args.query_head = q.stride(2);
  args.keys = pool_of_samples(k);
  args.values = pool_of_samples(v);
  args.block_size = k.size(0);
  args.table_stride = 1;
  args.sequences = q.size(1);
  args.count = q.size(0);
  args.start = k.size(0) - q.size(0);
  return args;
}

void start([[maybe_unused]] const OrderedAttention& args, const at::Tensor& on) {
  launch(
      on, 1, 1, [](int64_t, int64_t) {},
      [&](void* stream) { MEGATRON_CUDA_KERNEL(ordered_attention_cuda(args, stream)); });
}

}  // namespace

std::string why_not_ordered(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& o) {
  if (std::string reason = why_not_options(o); !reason.empty()) return reason;
  const bool fits = q.stride(3) == 1 && k.stride(3) == 1 && v.stride(3) == 1 &&
                    q.size(3) == v.size(3) && q.size(0) <= k.size(0);
  if (!fits || !knows(trained(q, k, v, o)))
    return "on GPUs it is built for Hopper, bf16 and fp16, and heads of at most 128 features, a "
           "multiple of 8";
  return "";
}

AttentionBlock ordered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AttentionOptions& options) {
  const int64_t s = q.size(0), b = q.size(1), n = q.size(2), d = q.size(3);
  AttentionBlock block{at::empty({s, b, n, d}, q.options()),
                       at::empty({b, n, s, 1}, q.options().dtype(at::kFloat))};
  OrderedAttention args = trained(q, k, v, options);
  args.out = block.out.data_ptr();
  args.out_row = b * n * d;
  args.out_part = n * d;
  args.out_head = d;
  args.lse = block.lse.data_ptr<float>();
  const at::Tensor table = at::arange(b, q.options().dtype(at::kInt));
  args.block_table = table.const_data_ptr<int32_t>();
  start(args, q);
  return block;
}

at::Tensor ordered_rows(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                        const PagedRows& rows, const AttentionOptions& options) {
  const std::string reason = why_not_options(options);
  MEGATRON_CHECK(reason.empty(), "--batch-invariant-mode cannot compute this attention: ", reason);
  const at::Tensor queries = q.contiguous();
  const int64_t n = q.size(2), d = q.size(3);
  at::Tensor out = at::empty(queries.sizes(), queries.options());
  OrderedAttention args = arguments(queries, keys.pool.size(2), options);
  args.query_row = args.query_part = args.out_row = args.out_part = n * d;
  args.query_head = args.out_head = d;
  args.keys = pool_of(keys, queries);
  args.values = pool_of(values, queries);
  args.block_size = rows.block_size();
  args.query = queries.const_data_ptr();
  args.out = out.data_ptr();
  const bool fits = values.pool.size(3) == d && knows(args);  // not a cache in FP8
  MEGATRON_CHECK(fits, "--batch-invariant-mode on GPUs knows no cache of ", n, " heads of ", d,
                 " features in ", toString(q.scalar_type()), " in blocks of ", rows.block_size(),
                 " positions\nhint: it is built for Hopper, bf16 and fp16, at most 128 features, a "
                 "multiple of 8, and --inference-dynamic-batching-block-size of a multiple of 16");
  const int64_t singles = rows.single();
  if (singles > 0) {
    args.lengths = rows.lengths.const_data_ptr<int32_t>();
    args.block_table = rows.block_table.const_data_ptr<int32_t>();
    args.table_stride = rows.block_table.size(1);
    args.sequences = singles;
    start(args, q);
  }
  if (rows.rows() > singles) {
    const PagedRows::Spans& spans = rows.spans(ordered_span_rows(n, args.groups));
    args.lengths = nullptr;
    args.block_table = spans.block_table.const_data_ptr<int32_t>();
    args.table_stride = spans.block_table.size(1);
    args.spans = spans.spans.const_data_ptr<int32_t>();
    args.num_spans = spans.spans.size(0);
    start(args, q);
  }
  return out;
}

}  // namespace megatron
