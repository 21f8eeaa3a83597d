#include "megatron/tensor/detail/attention_rows.h"

#include "megatron/base/check.h"
#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Keys [s_k, b, g, d] as a pool with a block of s_k positions for each sample.
PagedPool pool_of(const at::Tensor& keys) {
  return {keys.const_data_ptr(), keys.stride(1), keys.stride(0), keys.stride(2), nullptr};
}

// The first key that each query may attend to, [s, b] int32.
at::Tensor first_seen(const at::Tensor& mask, int64_t s, int64_t b, const at::Tensor& lengths) {
  const at::Tensor hidden = mask.squeeze(1).expand({b, s, mask.size(3)}).transpose(0, 1);
  const at::Tensor keys = at::arange(mask.size(3), at::kLong);
  // Keys up to a row's last one: those hidden must be the first ones.
  const at::Tensor in_reach = keys.unsqueeze(0) < lengths.view({s, b}).unsqueeze(2);
  const at::Tensor num_hidden = hidden.logical_and(in_reach).sum(2);
  const at::Tensor prefix = keys.unsqueeze(0) < num_hidden.unsqueeze(2);
  MEGATRON_CHECK(at::equal(prefix, hidden.logical_and(in_reach)) &&
                     num_hidden.lt(lengths.view({s, b})).all().item<bool>(),
                 "batch-invariant attention knows no mask but the borders of documents");
  return num_hidden.to(at::kInt).contiguous();
}

}  // namespace

std::string why_not_rows(const at::Tensor& q, const AttentionOptions& o) {
  if (!q.is_cpu()) return "it is not built for GPUs yet";
  if (o.dropout > 0.0) return "attention dropout is drawn for the whole of the scores";
  if (o.distance_bias.defined()) return "relative positions are added to the scores";
  if (!o.causal && (o.window_left >= 0 || o.window_right >= 0))
    return "windows to both sides need a kernel of their own";
  return "";
}

AttentionBlock rows_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options) {
  const int64_t s = q.size(0), b = q.size(1), n = q.size(2), s_k = k.size(0);
  const at::Tensor query = q.contiguous();
  const at::Tensor keys = k.stride(3) == 1 ? k : k.contiguous();
  const at::Tensor values = v.stride(3) == 1 ? v : v.contiguous();
  MEGATRON_ASSERT(!options.causal || s <= s_k, s, " queries after ", s_k, " keys");
  const at::Tensor samples = at::arange(b, at::kInt);
  const at::Tensor lengths =
      (options.causal ? at::arange(s_k - s + 1, s_k + 1, at::kInt) : at::full({s}, s_k, at::kInt))
          .unsqueeze(1)
          .expand({s, b})
          .contiguous();
  const at::Tensor sequences = samples.unsqueeze(0).expand({s, b}).contiguous();
  const at::Tensor starts =
      options.mask.defined() ? first_seen(options.mask, s, b, lengths) : at::Tensor();
  const at::Tensor sinks =
      options.sinks.defined() ? options.sinks.to(accumulate_type(q)).contiguous() : at::Tensor();
  const at::Tensor out = at::empty({s, b, n, v.size(3)}, q.options());
  const at::Tensor lse = at::empty({s, b, n}, q.options().dtype(accumulate_type(q)));
  PagedAttention args;
  args.dtype = to_dtype(q.scalar_type());
  args.rows = s * b;
  args.heads = n;
  args.groups = k.size(2);
  args.key_size = q.size(3);
  args.value_size = v.size(3);
  args.scale = options.scale;
  args.softcap = options.softcap;
  args.window_left = options.causal ? options.window_left : -1;
  args.sinks = sinks.defined() ? sinks.const_data_ptr() : nullptr;
  args.query = query.const_data_ptr();
  args.keys = pool_of(keys);
  args.values = pool_of(values);
  args.block_size = s_k;
  args.sequences = sequences.const_data_ptr<int32_t>();
  args.lengths = lengths.const_data_ptr<int32_t>();
  args.block_table = samples.const_data_ptr<int32_t>();
  args.table_stride = 1;
  args.out = out.data_ptr();
  args.starts = starts.defined() ? starts.const_data_ptr<int32_t>() : nullptr;
  args.lse = lse.data_ptr();
  const int64_t work = s_k * (args.key_size + args.value_size) * n / args.groups;
  parallel_rows(args.rows * args.groups, work,
                [&](int64_t begin, int64_t end) { paged_attention_cpu(args, begin, end); });
  return {out, lse.permute({1, 2, 0})};
}

}  // namespace megatron
