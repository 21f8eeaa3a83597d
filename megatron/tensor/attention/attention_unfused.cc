#include "megatron/tensor/detail/attention_unfused.h"

#include <algorithm>

#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kScoreElements = int64_t{1} << 26;  // 256 MiB of fp32 scores at a time

// Batch entries [b0, b1) and key groups [g0, g1).
struct Chunk {
  int64_t b0, b1, g0, g1;
};

std::vector<Chunk> make_chunks(const at::Tensor& q, const at::Tensor& k) {
  const int64_t b = q.size(1), n = q.size(2), g = k.size(2);
  const int64_t group = std::max<int64_t>(1, n / g * q.size(0) * k.size(0));
  if (b * g * group <= kScoreElements) return {{0, b, 0, g}};
  std::vector<Chunk> chunks;
  const int64_t step = std::clamp<int64_t>(kScoreElements / group, 1, g);
  for (int64_t i = 0; i < b; ++i) {
    for (int64_t j = 0; j < g; j += step) chunks.push_back({i, i + 1, j, std::min(j + step, g)});
  }
  return chunks;
}

// [s, b, g * r, d] -> [b, g, r * s, d] of one chunk, in the accumulating type.
at::Tensor grouped_rows(const at::Tensor& t, const Chunk& c, int64_t r) {
  const at::Tensor part = t.narrow(1, c.b0, c.b1 - c.b0).narrow(2, c.g0 * r, (c.g1 - c.g0) * r);
  return part.permute({1, 2, 0, 3})
      .to(accumulate_type(t))
      .reshape({c.b1 - c.b0, c.g1 - c.g0, r * t.size(0), t.size(3)});
}

// The inverse, written into `out` (rounded to its type).
void put_grouped_rows(const at::Tensor& rows, const at::Tensor& out, const Chunk& c, int64_t r) {
  const int64_t s = out.size(0), d = out.size(3), heads = (c.g1 - c.g0) * r;
  out.narrow(1, c.b0, c.b1 - c.b0)
      .narrow(2, c.g0 * r, heads)
      .copy_(rows.reshape({c.b1 - c.b0, heads, s, d}).permute({2, 0, 1, 3}));
}

// The mask of one chunk's samples.
at::Tensor chunk_mask(const at::Tensor& mask, const Chunk& c) {
  return mask.dim() == 4 && mask.size(0) > 1 ? mask.narrow(0, c.b0, c.b1 - c.b0) : mask;
}

// This chunk's heads of [n, ...].
at::Tensor chunk_heads(const at::Tensor& t, const Chunk& c, int64_t r) {
  return t.narrow(0, c.g0 * r, (c.g1 - c.g0) * r);
}

// By distance [n, s + s_k - 1] -> of each query and key [n, s, s_k].
at::Tensor bias_of_scores(const at::Tensor& bias, int64_t s) {
  const int64_t n = bias.size(0), l = bias.size(1);
  return bias.contiguous().as_strided({n, s, l - s + 1}, {l, 1, 1}).flip(1);
}

// The sum of [b, n, s, s_k] over samples and over pairs of a query and a key of equal distance, [n,
// s + s_k - 1]: each row is written at its place in a wider one, so that no order is left open.
at::Tensor sum_by_distance(const at::Tensor& scores) {
  const int64_t n = scores.size(1), s = scores.size(2), s_k = scores.size(3), l = s + s_k - 1;
  const at::Tensor rows = at::zeros({n, s, l}, scores.options());
  at::Tensor places = rows.as_strided({n, s, s_k}, {s * l, l - 1, 1}, s - 1);
  at::sum_out(places, scores, at::IntArrayRef{0});
  return rows.sum(1);
}

// Scaled (and soft-capped) scores of one chunk [b, n, s, s_k]; -infinity where masked.
at::Tensor masked_scores(const at::Tensor& q, const at::Tensor& k_transposed,
                         const at::Tensor& mask, const Chunk& c, int64_t s,
                         const AttentionOptions& o) {
  at::Tensor scores = at::matmul(q, k_transposed).mul_(o.scale);
  if (o.softcap > 0.0) scores.div_(o.softcap).tanh_().mul_(o.softcap);
  scores = scores.view({scores.size(0), -1, s, scores.size(3)});
  if (o.distance_bias.defined())
    scores.add_(bias_of_scores(chunk_heads(o.distance_bias, c, q.size(2) / s), s));
  if (mask.defined())
    scores.masked_fill_(chunk_mask(mask, c), -std::numeric_limits<double>::infinity());
  return scores;
}

// Probabilities of one chunk [b, n, s, s_k]; rows that are fully masked are zero.
at::Tensor probabilities(const at::Tensor& q, const at::Tensor& k_transposed,
                         const at::Tensor& mask, const Chunk& c, int64_t s,
                         const AttentionOptions& o) {
  at::Tensor probs = at::softmax(masked_scores(q, k_transposed, mask, c, s, o), -1);
  if (mask.defined()) probs.masked_fill_(chunk_mask(mask, c), 0.0);
  return probs;
}

// From gradients of the capped scores to those of q k^T, in place.   d(c tanh(u / c)) = (1 -
// tanh^2(u / c)) du
at::Tensor raw_score_grads(at::Tensor dscores, const at::Tensor& q, const at::Tensor& k_transposed,
                           const AttentionOptions& o) {
  if (o.softcap > 0.0) {
    const at::Tensor t = at::matmul(q, k_transposed).mul_(o.scale / o.softcap).tanh_();
    dscores.mul_(t.square_().neg_().add_(1.0).view(dscores.sizes()));
  }
  return dscores.mul_(o.scale);
}

// exp(score - lse) of one chunk, in place; `lse` [b, n, s] covers these and perhaps further keys.
at::Tensor probabilities_given(const at::Tensor& lse, const at::Tensor& scores,
                               const at::Tensor& mask, const Chunk& c) {
  scores.sub_(lse.unsqueeze(-1)).exp_();
  if (mask.defined()) scores.masked_fill_(chunk_mask(mask, c), 0.0);
  return scores;
}

// This chunk's slice of [b, n, s].
at::Tensor chunk_rows(const at::Tensor& lse, const Chunk& c, int64_t r) {
  return lse.narrow(0, c.b0, c.b1 - c.b0).narrow(1, c.g0 * r, (c.g1 - c.g0) * r);
}

// 0 or 1 / (1 - p) per probability of the chunk; undefined without dropout.
at::Tensor dropout_mask(const AttentionOptions& o, const Chunk& c, int64_t r, at::ScalarType type) {
  if (o.dropout == 0.0) return {};
  const TokenPositions query{o.place.sample.narrow(0, c.b0, c.b1 - c.b0), o.place.position};
  return attention_dropout_mask((c.g1 - c.g0) * r, o.first_head + c.g0 * r, o.dropout, o.key, query,
                                o.key_position)
      .to(type);
}

}  // namespace

at::Tensor attention_mask(const at::Tensor& q, const at::Tensor& k,
                          const AttentionOptions& options) {
  const int64_t s = q.size(0), s_k = k.size(0), right = options.causal ? 0 : options.window_right;
  at::Tensor mask = options.mask;
  const bool left_limits = options.window_left >= 0 && options.window_left < s_k - 1;
  const bool right_limits = right >= 0 && right < s_k - 1 && !(right == 0 && s == 1);
  if (!left_limits && !right_limits) return mask;
  const auto type = q.options().dtype(at::kLong);
  const at::Tensor ahead =
      at::arange(s_k, type).unsqueeze(0) - (at::arange(s, type).unsqueeze(1) + (s_k - s));
  at::Tensor pattern;
  if (right_limits) pattern = ahead.gt(right);
  if (left_limits) {
    const at::Tensor behind = ahead.lt(-options.window_left);
    pattern = pattern.defined() ? pattern.logical_or(behind) : behind;
  }
  return mask.defined() ? mask.logical_or(pattern) : pattern;
}

at::Tensor unfused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options) {
  const int64_t s = q.size(0), r = q.size(2) / k.size(2);
  at::Tensor out = at::empty({s, q.size(1), q.size(2), v.size(3)}, q.options());
  const at::Tensor mask = attention_mask(q, k, options);
  for (const Chunk& c : make_chunks(q, k)) {
    const at::Tensor keys = grouped_rows(k, c, 1), values = grouped_rows(v, c, 1);
    const at::Tensor rows = grouped_rows(q, c, r);
    at::Tensor probs = probabilities(rows, keys.transpose(-1, -2), mask, c, s, options);
    const at::Tensor keep = dropout_mask(options, c, r, probs.scalar_type());
    if (keep.defined()) probs.mul_(keep);
    put_grouped_rows(at::matmul(probs.view({rows.size(0), rows.size(1), r * s, -1}), values), out,
                     c, r);
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> unfused_attention_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const AttentionOptions& options, const at::Tensor& dbias) {
  const int64_t s = q.size(0), r = q.size(2) / k.size(2);
  at::Tensor dq = at::empty(q.sizes(), q.options());
  at::Tensor dk = at::empty(k.sizes(), k.options());
  at::Tensor dv = at::empty(v.sizes(), v.options());
  const at::Tensor mask = attention_mask(q, k, options);
  for (const Chunk& c : make_chunks(q, k)) {
    const at::Tensor keys = grouped_rows(k, c, 1), values = grouped_rows(v, c, 1);
    const at::Tensor rows = grouped_rows(q, c, r), grad = grouped_rows(dout, c, r);
    const at::Tensor probs = probabilities(rows, keys.transpose(-1, -2), mask, c, s, options);
    const at::Tensor keep = dropout_mask(options, c, r, probs.scalar_type());
    const std::vector<int64_t> grouped = {rows.size(0), rows.size(1), r * s, keys.size(2)};
    const at::Tensor kept = keep.defined() ? probs.mul(keep) : probs;
    put_grouped_rows(at::matmul(kept.view(grouped).transpose(-1, -2), grad), dv, c, 1);
    at::Tensor dprobs = at::matmul(grad, values.transpose(-1, -2)).view(probs.sizes());
    if (keep.defined()) dprobs.mul_(keep);
    // d softmax: dscore = p (dp - sum(dp p)), and the scale of the scores.
    at::Tensor dscores = at::_softmax_backward_data(dprobs, probs, -1, probs.scalar_type());
    if (dbias.defined()) {
      dprobs.reset();
      chunk_heads(dbias, c, r).add_(sum_by_distance(dscores));
    }
    dscores = raw_score_grads(dscores, rows, keys.transpose(-1, -2), options).view(grouped);
    put_grouped_rows(at::matmul(dscores, keys), dq, c, r);
    put_grouped_rows(at::matmul(dscores.transpose(-1, -2), rows), dk, c, 1);
  }
  return {dq, dk, dv};
}

AttentionBlock unfused_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options) {
  const int64_t s = q.size(0), b = q.size(1), n = q.size(2), r = n / k.size(2);
  const auto type = q.options().dtype(accumulate_type(q));
  AttentionBlock block{at::empty({s, b, n, v.size(3)}, type), at::empty({b, n, s}, type)};
  const at::Tensor mask = attention_mask(q, k, options);
  for (const Chunk& c : make_chunks(q, k)) {
    const at::Tensor rows = grouped_rows(q, c, r), keys = grouped_rows(k, c, 1).transpose(-1, -2);
    const at::Tensor scores = masked_scores(rows, keys, mask, c, s, options);
    const at::Tensor lse = at::logsumexp(scores, -1);
    chunk_rows(block.lse, c, r).copy_(lse);
    const at::Tensor probs = probabilities_given(lse, scores, mask, c);
    const at::Tensor keep = dropout_mask(options, c, r, probs.scalar_type());
    if (keep.defined()) probs.mul_(keep);
    put_grouped_rows(
        at::matmul(probs.view({rows.size(0), rows.size(1), r * s, -1}), grouped_rows(v, c, 1)),
        block.out, c, r);
  }
  return block;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> unfused_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options,
    const at::Tensor& dbias) {
  const int64_t s = q.size(0), r = q.size(2) / k.size(2);
  const auto type = q.options().dtype(accumulate_type(q));
  at::Tensor dq = at::empty(q.sizes(), type), dk = at::empty(k.sizes(), type),
             dv = at::empty(v.sizes(), type);
  const at::Tensor mask = attention_mask(q, k, options);
  for (const Chunk& c : make_chunks(q, k)) {
    const at::Tensor keys = grouped_rows(k, c, 1), values = grouped_rows(v, c, 1);
    const at::Tensor rows = grouped_rows(q, c, r), grad = grouped_rows(dout, c, r);
    const std::vector<int64_t> grouped = {rows.size(0), rows.size(1), r * s, keys.size(2)};
    const at::Tensor scores = masked_scores(rows, keys.transpose(-1, -2), mask, c, s, options);
    const at::Tensor probs = probabilities_given(chunk_rows(lse, c, r), scores, mask, c);
    const at::Tensor keep = dropout_mask(options, c, r, probs.scalar_type());
    const at::Tensor kept = keep.defined() ? probs.mul(keep) : probs;
    put_grouped_rows(at::matmul(kept.view(grouped).transpose(-1, -2), grad), dv, c, 1);
    at::Tensor dscores = at::matmul(grad, values.transpose(-1, -2)).view(probs.sizes());
    if (keep.defined()) dscores.mul_(keep);
    // dscore = p (dp - sum over ALL keys of dp p), and that sum is dout . out.
    const at::Tensor mean =
        (grad * grouped_rows(out, c, r)).sum(-1).view({probs.size(0), probs.size(1), s, 1});
    dscores.sub_(mean).mul_(probs);
    if (dbias.defined()) chunk_heads(dbias, c, r).add_(sum_by_distance(dscores));
    dscores = raw_score_grads(dscores, rows, keys.transpose(-1, -2), options).view(grouped);
    put_grouped_rows(at::matmul(dscores, keys), dq, c, r);
    put_grouped_rows(at::matmul(dscores.transpose(-1, -2), rows), dk, c, 1);
  }
  return {dq, dk, dv};
}

}  // namespace megatron
