#include "megatron/tensor/detail/attention_masked.h"

#include <limits>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kAlignment = 8;  // elements of a row of the bias

at::Tensor to_samples(const at::Tensor& t) {
  const at::Tensor last = t.stride(3) == 1 ? t : t.contiguous();
  return last.transpose(0, 1);
}

// [b, n, s, s_k] of [b or 1, 1, 1, s_k]
at::Tensor bias_of(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& o) {
  const at::Tensor keys = o.mask.narrow(2, 0, 1);
  return at::zeros(keys.sizes(), q.options())
      .masked_fill_(keys, -std::numeric_limits<double>::infinity())
      .expand({q.size(1), q.size(2), q.size(0), k.size(0)});
}

}  // namespace

std::string why_not_masked_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionOptions& o) {
  if (!q.is_cuda()) return "it needs a CUDA device";
  if (!o.mask.defined() || o.causal || o.mask.stride(2) != 0) return "queries see different keys";
  if (o.window_left >= 0 || o.window_right >= 0) return "a window is given";
  AttentionOptions others = o;
  others.mask = at::Tensor();
  if (const std::string reason = why_unfused(q, k, v, others, /*knows_windows=*/false);
      !reason.empty())
    return reason;
  if (o.sinks.defined()) return "a sink is given";
  if (q.size(2) != k.size(2)) return "key/value groups are shared by several query heads";
  if (q.size(3) != v.size(3)) return "values are not as wide as keys";
  if (k.size(0) % kAlignment != 0) return "the number of keys is no multiple of 8";
  return "";
}

MaskedAttention masked_attention_forward(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const AttentionOptions& o) {
  auto r = at::_efficient_attention_forward(
      to_samples(q), to_samples(k), to_samples(v), bias_of(q, k, o), {}, {}, {}, {},
      /*dropout_p=*/0.0, /*custom_mask_type=*/0, /*compute_log_sumexp=*/true, o.scale);
  return {std::get<0>(r), std::get<1>(r), std::get<2>(r), std::get<3>(r)};
}

AttentionGrads masked_attention_backward(const at::Tensor& dout, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const MaskedAttention& f, const AttentionOptions& o) {
  const auto r = at::_efficient_attention_backward(
      to_samples(dout), to_samples(q), to_samples(k), to_samples(v), bias_of(q, k, o), f.out, {},
      {}, q.size(0), k.size(0), f.lse, /*dropout_p=*/0.0, f.seed, f.offset, /*custom_mask_type=*/0,
      /*bias_requires_grad=*/false, o.scale, /*num_splits_key=*/1);
  return {std::get<0>(r).transpose(0, 1), std::get<1>(r).transpose(0, 1),
          std::get<2>(r).transpose(0, 1)};
}

}  // namespace megatron
