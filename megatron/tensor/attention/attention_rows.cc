#include "megatron/tensor/detail/attention_rows.h"

#include "megatron/base/check.h"
#include "megatron/tensor/detail/paged_rows.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Keys [s_k, b, g, d] as a pool with a block of s_k positions for each sample.
PagedView pool_of(const at::Tensor& keys) {
  return {(keys.stride(3) == 1 ? keys : keys.contiguous()).transpose(0, 1)};
}

// The first key that each query may attend to, [s, b] int32. Of the keys up to a row's last one the
// hidden ones must be the first, and not all.
at::Tensor first_seen(const at::Tensor& mask, const at::Tensor& lengths) {
  const int64_t s = lengths.size(0), b = lengths.size(1);
  const at::Tensor keys = at::arange(mask.size(3), at::kLong), ends = lengths.unsqueeze(2);
  const at::Tensor hidden =
      mask.squeeze(1).expand({b, s, mask.size(3)}).transpose(0, 1).logical_and(keys < ends);
  const at::Tensor num_hidden = hidden.sum(2);
  MEGATRON_CHECK(at::equal(hidden, keys < num_hidden.unsqueeze(2)) &&
                     num_hidden.lt(lengths).all().item<bool>(),
                 "batch-invariant attention knows no mask but the borders of documents");
  return num_hidden.to(at::kInt).contiguous();
}

}  // namespace

std::string why_not_rows(const AttentionOptions& o) {
  if (o.dropout > 0.0) return "attention dropout is drawn for the whole of the scores";
  if (o.distance_bias.defined()) return "relative positions are added to the scores";
  if (!o.causal && (o.window_left >= 0 || o.window_right >= 0))
    return "windows to both sides need a kernel of their own";
  return "";
}

AttentionBlock rows_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options) {
  const int64_t s = q.size(0), b = q.size(1), n = q.size(2), s_k = k.size(0);
  MEGATRON_ASSERT(!options.causal || s <= s_k, s, " queries after ", s_k, " keys");
  const at::Tensor samples = at::arange(b, at::kInt);
  const at::Tensor lengths =
      (options.causal ? at::arange(s_k - s + 1, s_k + 1, at::kInt) : at::full({s}, s_k, at::kInt))
          .unsqueeze(1)
          .expand({s, b})
          .contiguous();
  PagedTables tables{samples.unsqueeze(0).expand({s, b}).contiguous(), lengths,
                     samples.unsqueeze(1), s_k, s_k};
  if (options.mask.defined()) tables.starts = first_seen(options.mask, lengths);
  const at::Tensor lse = at::empty({s, b, n}, q.options().dtype(accumulate_type(q)));
  const at::Tensor out =
      attend_rows(q.reshape({s * b, n, q.size(3)}), pool_of(k), pool_of(v), tables, options, lse);
  return {out.view({s, b, n, v.size(3)}), lse.permute({1, 2, 0})};
}

}  // namespace megatron
