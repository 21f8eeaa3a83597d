#include "megatron/tensor/detail/attention_library.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

bool is_windowed(const at::Tensor& k, const AttentionOptions& o) {
  const int64_t last = k.size(0) - 1;
  return (o.window_left >= 0 && o.window_left < last) ||
         (!o.causal && o.window_right >= 0 && o.window_right < last);
}

}  // namespace

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& o) {
  check_shape("attention q", q, {-1, -1, -1, -1});
  check_shape("attention k", k, {-1, q.size(1), -1, q.size(3)});
  check_shape("attention v", v, {k.size(0), q.size(1), k.size(2), -1});
  MEGATRON_ASSERT(k.size(2) > 0 && q.size(2) % k.size(2) == 0, "attention of ", q.size(2),
                  " heads over ", k.size(2), " groups");
  MEGATRON_ASSERT(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
                  "attention over different types");
  MEGATRON_ASSERT(!o.sinks.defined() || (o.sinks.dim() == 1 && o.sinks.size(0) % q.size(2) == 0 &&
                                         q.size(1) * q.size(2) % o.sinks.size(0) == 0),
                  "sinks for other heads than ", q.size(2));
  MEGATRON_ASSERT(o.dropout >= 0.0 && o.dropout < 1.0, "attention dropout of ", o.dropout);
  if (o.mask.defined()) {
    check_shape("attention mask", o.mask, {o.mask.size(0), 1, q.size(0), k.size(0)});
    MEGATRON_ASSERT(
        o.mask.scalar_type() == at::kBool && (o.mask.size(0) == 1 || o.mask.size(0) == q.size(1)),
        "attention mask must be bool for 1 or ", q.size(1), " samples");
  }
  if (o.distance_bias.defined()) {
    check_shape("attention distance_bias", o.distance_bias, {q.size(2), q.size(0) + k.size(0) - 1});
    MEGATRON_ASSERT(o.softcap == 0.0 && !o.sinks.defined(), "a bias beside a softcap or sinks");
    MEGATRON_ASSERT(o.distance_bias.scalar_type() == accumulate_type(q), "a bias of another type");
  }
  if (o.dropout > 0.0) {
    check_shape("attention place.sample", o.place.sample, {q.size(1)});
    check_shape("attention place.position", o.place.position, {q.size(0)});
    check_shape("attention key_position", o.key_position, {k.size(0)});
  }
}

bool library_mask_fits(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& o) {
  return !o.causal || q.size(0) == k.size(0) || q.size(0) == 1;
}

std::string why_unfused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionOptions& o, bool knows_windows) {
  if (o.mask.defined()) return "a mask is given";
  if (o.softcap > 0.0) return "scores are soft-capped";
  if (o.distance_bias.defined()) return "relative positions are added to the scores";
  if (o.dropout > 0.0) return "attention dropout is position-keyed";
  if (!knows_windows && is_windowed(k, o)) return "a sliding window is given";
  if (q.size(3) < v.size(3)) return "values are wider than keys";
  if (q.numel() == 0 || k.numel() == 0) return "there is nothing to attend to";
  if (!q.is_cuda()) {
    return !o.causal || q.size(0) <= k.size(0) ? "" : "there are more queries than keys";
  }
  if (!library_mask_fits(q, k, o)) return "queries and keys differ in number";
  if (q.scalar_type() != at::kBFloat16 && q.scalar_type() != at::kHalf)
    return "the type is not bf16 or fp16";
  if (q.size(3) % 8 != 0 || q.size(3) > 256)
    return "the head size is not a multiple of 8 up to 256";
  return "";
}

at::Tensor padded(const at::Tensor& t, int64_t width) {
  return t.size(3) == width ? t : at::constant_pad_nd(t, {0, width - t.size(3)});
}

at::Tensor to_heads(const at::Tensor& t) { return t.permute({1, 2, 0, 3}); }
at::Tensor from_heads(const at::Tensor& t) { return t.permute({2, 0, 1, 3}); }
at::Tensor fold_groups(const at::Tensor& t, int64_t groups) {
  const int64_t s = t.size(0), b = t.size(1), n = t.size(2), d = t.size(3);
  return to_heads(t.reshape({s, b * groups, n / groups, d}));
}

DeterministicScope::DeterministicScope()
    : algorithms_(at::globalContext().deterministicAlgorithms()),
      warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()),
      fill_(at::globalContext().deterministicFillUninitializedMemory()) {
  at::globalContext().setDeterministicAlgorithms(true, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

DeterministicScope::~DeterministicScope() {
  at::globalContext().setDeterministicAlgorithms(algorithms_, warn_only_);
  at::globalContext().setDeterministicFillUninitializedMemory(fill_);
}

}  // namespace megatron
