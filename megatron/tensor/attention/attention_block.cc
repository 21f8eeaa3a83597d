#include "megatron/tensor/attention/attention_block.h"

#include "megatron/base/check.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/detail/attention_unfused.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The keys before the queries' own tokens, which all queries see, and the square on the diagonal.
// The libraries' masks fit each half, but not the whole if there are more keys than queries.
struct Halves {
  explicit Halves(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options)
      : keys_before(k.size(0) - q.size(0)),
        num_queries(q.size(0)),
        before(options),
        diagonal(options) {
    before.causal = false;
    before.window_right = -1;
  }
  at::Tensor first(const at::Tensor& t) const { return t.narrow(0, 0, keys_before); }
  at::Tensor second(const at::Tensor& t) const { return t.narrow(0, keys_before, num_queries); }
  int64_t keys_before, num_queries;
  AttentionOptions before, diagonal;
};

// Whether a library kernel supports this, perhaps in two halves.
bool is_library(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttentionOptions& options) {
  if (!q.is_cuda() || options.backend == AttentionBackend::kUnfused ||
      options.backend == AttentionBackend::kLocal) {
    MEGATRON_CHECK(options.backend != AttentionBackend::kFused,
                   "--attention-backend fused cannot compute this block of attention: it needs a "
                   "CUDA device\nhint: --attention-backend auto");
    return false;
  }
  AttentionOptions square = options;
  if (options.causal && q.size(0) < k.size(0)) {
    square.causal = false;
    square.window_right = -1;
  }
  const std::string reason = why_unfused(q, k, v, square);
  MEGATRON_CHECK(reason.empty() || options.backend == AttentionBackend::kAuto,
                 "--attention-backend ",
                 options.backend == AttentionBackend::kFused ? "fused" : "flash",
                 " cannot compute this block of attention: ", reason,
                 "\nhint: --attention-backend auto falls back to unfused attention");
  return reason.empty();
}

// For a block with the library's mask: cuDNN if supported and allowed, else flash attention.
bool is_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const AttentionOptions& o) {
  if (o.backend == AttentionBackend::kFlash) return false;
  const int64_t g = k.size(2);
  const std::string reason =
      q.size(0) % 64 != 0 || k.size(0) % 64 != 0
          ? "the length is not a multiple of 64"
          : why_not_cudnn(fold_groups(q, g), fold_groups(k, g), fold_groups(v, g), o);
  MEGATRON_CHECK(reason.empty() || o.backend == AttentionBackend::kAuto,
                 "--attention-backend fused cannot compute this block of attention: ", reason,
                 "\nhint: --attention-backend auto takes a backend that can");
  return reason.empty();
}

AttentionBlock square_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& o) {
  const int64_t g = k.size(2);
  if (is_cudnn(q, k, v, o)) {
    const at::Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    const at::Tensor lse = cudnn_attention_forward(fold_groups(q, g), fold_groups(k, g),
                                                   fold_groups(v, g), fold_groups(out, g), o);
    return {out, lse.view({q.size(1), q.size(2), q.size(0)})};
  }
  const auto r = at::_scaled_dot_product_flash_attention(to_heads(q), to_heads(k),
                                                         to_heads(padded(v, q.size(3))), 0.0,
                                                         o.causal && q.size(0) > 1, false, o.scale);
  return {from_heads(std::get<0>(r)).narrow(3, 0, v.size(3)), std::get<1>(r)};
}

AttentionGrads square_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& o) {
  const int64_t g = k.size(2);
  if (is_cudnn(q, k, v, o)) {
    const at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()),
                     dv = at::empty(v.sizes(), v.options());
    const at::Tensor folded_lse =
        lse.reshape({q.size(1) * g, q.size(2) / g, q.size(0), 1}).contiguous();
    cudnn_attention_backward(fold_groups(dout, g), fold_groups(q, g), fold_groups(k, g),
                             fold_groups(v, g), fold_groups(out, g), folded_lse, fold_groups(dq, g),
                             fold_groups(dk, g), fold_groups(dv, g), o);
    return {dq, dk, dv};
  }
  const DeterministicScope deterministic;
  // only read with dropout
  const at::Tensor no_seed = at::empty({2}, q.options().dtype(at::kLong));
  const auto grads = at::_scaled_dot_product_flash_attention_backward(
      to_heads(padded(dout, q.size(3))), to_heads(q), to_heads(k), to_heads(padded(v, q.size(3))),
      to_heads(padded(out, q.size(3))), lse.contiguous(), at::Tensor(), at::Tensor(), q.size(0),
      k.size(0), 0.0, o.causal && q.size(0) > 1, no_seed, no_seed, o.scale);
  return {from_heads(std::get<0>(grads)), from_heads(std::get<1>(grads)),
          from_heads(std::get<2>(grads)).narrow(3, 0, v.size(3))};
}

AttentionBlock library_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionOptions& o) {
  if (library_mask_fits(q, k, o)) return square_forward(q, k, v, o);
  const Halves halves(q, k, o);
  AttentionBlock total = library_forward(q, halves.first(k), halves.first(v), halves.before);
  total.out = total.out.to(total.lse.scalar_type());
  add_attention_block(total,
                      library_forward(q, halves.second(k), halves.second(v), halves.diagonal));
  return total;
}

AttentionGrads library_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                const AttentionOptions& o) {
  if (library_mask_fits(q, k, o)) return square_backward(dout, q, k, v, out, lse, o);
  const Halves halves(q, k, o);
  const auto [dq_before, dk_before, dv_before] =
      library_backward(dout, q, halves.first(k), halves.first(v), out, lse, halves.before);
  const auto [dq, dk, dv] =
      library_backward(dout, q, halves.second(k), halves.second(v), out, lse, halves.diagonal);
  return {dq_before.to(lse.scalar_type()).add_(dq), at::cat({dk_before, dk}),
          at::cat({dv_before, dv})};
}

}  // namespace

AttentionBlock attention_block_forward(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AttentionOptions& options) {
  check_attention(q, k, v, options);
  MEGATRON_ASSERT(!options.sinks.defined(), "sinks are added to the combination of all blocks");
  const at::NoGradGuard no_grad;
  return is_library(q, k, v, options) ? library_forward(q, k, v, options)
                                      : unfused_block(q, k, v, options);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options,
    const at::Tensor& dbias) {
  check_attention(q, k, v, options);
  const at::NoGradGuard no_grad;
  return is_library(q, k, v, options)
             ? library_backward(dout, q, k, v, out, lse, options)
             : unfused_block_backward(dout, q, k, v, out, lse, options, dbias);
}

namespace {

// The sinks of lse's rows, [b, n, 1].
at::Tensor sinks_of_rows(const at::Tensor& sinks, const at::Tensor& lse) {
  const int64_t heads = lse.size(1), groups = sinks.size(0) / heads;
  return sinks.view({1, groups, heads})
      .expand({lse.size(0) / groups, groups, heads})
      .reshape({lse.size(0), heads, 1})
      .to(lse.scalar_type());
}

}  // namespace

void add_attention_sinks(const AttentionBlock& total, const at::Tensor& sinks) {
  const at::NoGradGuard no_grad;
  const at::Tensor lse = at::logaddexp(total.lse, sinks_of_rows(sinks, total.lse));
  total.out.mul_((total.lse - lse).exp_().permute({2, 0, 1}).unsqueeze(-1));
  total.lse.copy_(lse);
}

at::Tensor attention_sinks_grad(const at::Tensor& dout, const at::Tensor& out,
                                const at::Tensor& lse, const at::Tensor& sinks) {
  const at::NoGradGuard no_grad;
  // Its value is 0, so that dscore = p (0 - dout . out).
  const at::Tensor mean = (dout.to(lse.scalar_type()) * out).sum(-1).permute({1, 2, 0});
  const at::Tensor p = (sinks_of_rows(sinks, lse) - lse).exp_();
  return (p * mean).sum(-1).view({-1, sinks.size(0)}).sum(0).neg_().to(sinks.scalar_type());
}

void add_attention_block(const AttentionBlock& total, const AttentionBlock& block) {
  const at::NoGradGuard no_grad;
  const at::Tensor lse = at::logaddexp(total.lse, block.lse);
  // if neither block sees a key, both weights are 0
  const at::Tensor base = lse.masked_fill(lse.isinf(), 0.0);
  const auto weight = [&](const at::Tensor& part) {
    return (part - base).exp_().permute({2, 0, 1}).unsqueeze(-1);
  };
  total.out.mul_(weight(total.lse))
      .addcmul_(block.out.to(total.out.scalar_type()), weight(block.lse));
  total.lse.copy_(lse);
}

}  // namespace megatron
