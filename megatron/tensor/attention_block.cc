#include "megatron/tensor/attention_block.h"

#include "megatron/base/check.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/detail/attention_unfused.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The keys before the queries' own tokens, which all of them see, and the square on the diagonal.
// Each half is what the library's masks mean, which the whole is not when there are more keys than
// queries.
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

// Whether a flash kernel computes this, perhaps in two halves.
bool is_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const AttentionOptions& options) {
  MEGATRON_CHECK(options.backend != AttentionBackend::kFused,
                 "--attention-backend fused computes whole sequences only, not the blocks of "
                 "--cp-comm-type p2p or all_gather",
                 "\nhint: --attention-backend auto, or --cp-comm-type a2a");
  if (!q.is_cuda() || options.backend == AttentionBackend::kUnfused ||
      options.backend == AttentionBackend::kLocal)
    return false;
  AttentionOptions square = options;
  if (options.causal && q.size(0) < k.size(0)) {
    square.causal = false;
    square.window_right = -1;
  }
  const std::string reason = why_unfused(q, k, v, square);
  MEGATRON_CHECK(reason.empty() || options.backend == AttentionBackend::kAuto,
                 "--attention-backend flash cannot compute this block of attention: ", reason,
                 "\nhint: --attention-backend auto falls back to unfused attention");
  return reason.empty();
}

AttentionBlock flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& o) {
  if (!library_mask_fits(q, k, o)) {
    const Halves halves(q, k, o);
    AttentionBlock total = flash_forward(q, halves.first(k), halves.first(v), halves.before);
    total.out = total.out.to(total.lse.scalar_type());
    add_attention_block(total,
                        flash_forward(q, halves.second(k), halves.second(v), halves.diagonal));
    return total;
  }
  const auto r = at::_scaled_dot_product_flash_attention(to_heads(q), to_heads(k), to_heads(v), 0.0,
                                                         o.causal && q.size(0) > 1, false, o.scale);
  return {from_heads(std::get<0>(r)), std::get<1>(r)};
}

AttentionGrads flash_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const AttentionOptions& o) {
  if (!library_mask_fits(q, k, o)) {
    const Halves halves(q, k, o);
    const auto [dq_before, dk_before, dv_before] =
        flash_backward(dout, q, halves.first(k), halves.first(v), out, lse, halves.before);
    const auto [dq, dk, dv] =
        flash_backward(dout, q, halves.second(k), halves.second(v), out, lse, halves.diagonal);
    return {dq_before.to(lse.scalar_type()).add_(dq), at::cat({dk_before, dk}),
            at::cat({dv_before, dv})};
  }
  const DeterministicScope deterministic;
  const at::Tensor no_seed =
      at::empty({2}, q.options().dtype(at::kLong));  // read only with dropout
  const auto grads = at::_scaled_dot_product_flash_attention_backward(
      to_heads(dout), to_heads(q), to_heads(k), to_heads(v), to_heads(out), lse.contiguous(),
      at::Tensor(), at::Tensor(), q.size(0), k.size(0), 0.0, o.causal && q.size(0) > 1, no_seed,
      no_seed, o.scale);
  return {from_heads(std::get<0>(grads)), from_heads(std::get<1>(grads)),
          from_heads(std::get<2>(grads))};
}

}  // namespace

AttentionBlock attention_block_forward(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AttentionOptions& options) {
  check_attention(q, k, v, options);
  const at::NoGradGuard no_grad;
  return is_flash(q, k, v, options) ? flash_forward(q, k, v, options)
                                    : unfused_block(q, k, v, options);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options) {
  check_attention(q, k, v, options);
  const at::NoGradGuard no_grad;
  return is_flash(q, k, v, options) ? flash_backward(dout, q, k, v, out, lse, options)
                                    : unfused_block_backward(dout, q, k, v, out, lse, options);
}

void add_attention_block(const AttentionBlock& total, const AttentionBlock& block) {
  const at::NoGradGuard no_grad;
  const at::Tensor lse = at::logaddexp(total.lse, block.lse);
  const at::Tensor base =
      lse.masked_fill(lse.isinf(), 0.0);  // where neither part sees a key, both weights are 0
  const auto weight = [&](const at::Tensor& part) {
    return (part - base).exp_().permute({2, 0, 1}).unsqueeze(-1);
  };
  total.out.mul_(weight(total.lse))
      .addcmul_(block.out.to(total.out.scalar_type()), weight(block.lse));
  total.lse.copy_(lse);
}

}  // namespace megatron
