#include "megatron/tensor/detail/attention_distance.h"

#include "megatron/base/check.h"
#include "megatron/kernels/attention/distance_attention.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

#ifdef MEGATRON_CUDA
// Of [s, b, n, d], or of ranges of rows [R, n, d].
AttentionRows rows_of(const at::Tensor& t) {
  if (t.dim() == 3) return {t.data_ptr(), t.stride(0), 0, t.stride(1)};
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

at::Tensor contiguous_bias(const AttentionOptions& o) {
  return o.distance_bias.defined() ? o.distance_bias.contiguous() : at::Tensor();
}

// `ranges`: of the queries and the keys, or null.
DistanceAttentionArgs make_args(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& out, const at::Tensor& lse,
                                const at::Tensor& bias, const AttentionOptions& options,
                                const QueryKeyRanges* ranges) {
  DistanceAttentionArgs args;
  args.dtype = to_dtype(q.scalar_type());
  args.samples = lse.size(0);
  args.heads = lse.size(1);
  args.queries = ranges != nullptr ? ranges->queries.most : q.size(0);
  args.keys = ranges != nullptr ? ranges->keys.most : k.size(0);
  if (ranges != nullptr) {
    args.query_offsets = ranges->queries.offsets.const_data_ptr<int32_t>();
    args.key_offsets = ranges->keys.offsets.const_data_ptr<int32_t>();
  }
  args.head_size = q.size(-1);
  args.causal = options.causal;
  args.window_left = options.window_left;
  args.window_right = options.causal ? -1 : options.window_right;
  args.scale = options.scale;
  args.q = rows_of(q);
  args.k = rows_of(k);
  args.v = rows_of(v);
  args.out = rows_of(out);
  if (bias.defined()) args.bias = bias.const_data_ptr<float>();
  args.lse = lse.data_ptr<float>();
  return args;
}
#endif

// A row's strides are whole groups of 16 bytes.
bool is_aligned(const at::Tensor& t) {
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(-1) == 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    aligned = aligned && (t.size(i) == 1 || t.stride(i) % 8 == 0);
  return aligned;
}

}  // namespace

std::string why_not_distance_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& o, int64_t most_keys) {
  if (!q.is_cuda()) return "it needs a CUDA device";
  const bool windowed = o.window_left >= 0 || (!o.causal && o.window_right >= 0);
  if (!o.distance_bias.defined() && !is_narrow_window(o.window_left, o.causal ? 0 : o.window_right,
                                                      most_keys > 0 ? most_keys : k.size(0)))
    return "there is neither a bias by distance nor a narrow window";
  if (o.distance_bias.defined() && windowed) return "a sliding window is given";
  if (o.mask.defined()) return "a mask is given";
  if (o.dropout > 0.0) return "attention dropout is position-keyed";
  if (o.softcap > 0.0 || o.sinks.defined()) return "scores are soft-capped or have sinks";
  if (q.scalar_type() != at::kBFloat16 && q.scalar_type() != at::kHalf)
    return "the type is not bf16 or fp16";
  if (!distance_attention_supports(q.size(3)) || v.size(3) != q.size(3))
    return "the head size is not 64 or 128";
  if (k.size(2) != q.size(2)) return "heads share keys";
  if ((o.causal || windowed) && q.size(0) != k.size(0)) return "queries and keys differ in number";
  if (q.numel() == 0 || k.numel() == 0) return "there is nothing to attend to";
  if (!is_aligned(q) || !is_aligned(k) || !is_aligned(v)) return "rows are not aligned";
  return "";
}

#ifdef MEGATRON_CUDA
at::Tensor distance_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& out, const AttentionOptions& options,
                                      const QueryKeyRanges* ranges) {
  const at::Tensor bias = contiguous_bias(options);
  const at::Tensor lse =
      ranges != nullptr
          ? at::empty({ranges->queries.counts.size(0), q.size(1), ranges->queries.most},
                      q.options().dtype(at::kFloat))
          : at::empty({q.size(1), q.size(2), q.size(0)}, q.options().dtype(at::kFloat));
  distance_attention_forward_cuda(make_args(q, k, v, out, lse, bias, options, ranges),
                                  current_stream(q));
  return lse;
}

void distance_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                 const AttentionGrads& grads, const at::Tensor& dbias,
                                 const AttentionOptions& options, const QueryKeyRanges* ranges) {
  const auto& [dq, dk, dv] = grads;
  const at::Tensor bias = contiguous_bias(options),
                   dout_rows = is_aligned(dout) ? dout : dout.contiguous();
  MEGATRON_ASSERT(is_aligned(dq) && is_aligned(dk) && is_aligned(dv) &&
                      (!dbias.defined() || dbias.is_contiguous()),
                  "gradients of attention by distance that are not aligned");
  DistanceAttentionArgs args = make_args(q, k, v, out, lse, bias, options, ranges);
  args.dout = rows_of(dout_rows);
  args.dq = rows_of(dq);
  args.dk = rows_of(dk);
  args.dv = rows_of(dv);
  if (dbias.defined()) args.dbias = dbias.data_ptr<float>();
  // From the caching allocator: the stream orders its reuse.
  const at::Tensor workspace = at::empty({distance_attention_workspace(args, dbias.defined())},
                                         q.options().dtype(at::kByte));
  args.workspace = workspace.data_ptr();
  distance_attention_backward_cuda(args, current_stream(q));
}
#else
at::Tensor distance_attention_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const at::Tensor&, const AttentionOptions&,
                                      const QueryKeyRanges*) {
  MEGATRON_ASSERT(false, "attention by distance in a build without CUDA");
}
void distance_attention_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const AttentionGrads&, const at::Tensor&, const AttentionOptions&,
                                 const QueryKeyRanges*) {
  MEGATRON_ASSERT(false, "attention by distance in a build without CUDA");
}
#endif

}  // namespace megatron
