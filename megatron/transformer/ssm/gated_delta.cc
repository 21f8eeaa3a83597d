#include "megatron/transformer/ssm/gated_delta.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/document_rows.h"
#include "megatron/transformer/ssm/placed.h"

// Note [Chunks of the delta rule]
// With D[i, j] = exp(sum of g over rows j+1 .. i) for j <= i in one document, else 0, and into[i] =
// exp(sum over rows 0 .. i), or 0 where row i is not of the document of S, a chunk that the state S
// enters and S' leaves is
//
//   (I + A) E = beta (V - into (K S))     A[i, j] = beta[i] (k[i] . k[j]) D[i, j] for j < i
//   O  = (into (Q S) + ((Q K^T) * D) E) / sqrt(K)
//   S' = into[last] S + (D[last] K)^T E
//
// so that E = U - W S with (I + A) [U, W] = beta [V, into K]. As in a scan (ssd_scan.cc) the sums
// of D are cumulated from row j+1 for each j. Tensors inside a chunk of q rows have the shapes
// [b, Hk, Hv/Hk, q, ...]; those of queries and keys have 1 in the place of Hv/Hk.

namespace megatron {
namespace {

struct DeltaSizes {
  int64_t s, b, Hk, K, Hv, V;
  int64_t per_key() const { return Hv / Hk; }
};

DeltaSizes sizes_of(const DeltaOperands& o) {
  const DeltaSizes z{o.k.size(0), o.k.size(1), o.k.size(2), o.k.size(3), o.v.size(2), o.v.size(3)};
  MEGATRON_ASSERT(z.Hv % z.Hk == 0, z.Hv, " heads of values for ", z.Hk, " of keys");
  check_shape("queries of a delta rule", o.q, {z.s, z.b, z.Hk, z.K});
  check_shape("values of a delta rule", o.v, {z.s, z.b, z.Hv, z.V});
  check_shape("decay of a delta rule", o.g, {z.s, z.b, z.Hv});
  check_shape("beta of a delta rule", o.beta, {z.s, z.b, z.Hv});
  if (o.runs.defined()) check_shape("document runs of a delta rule", o.runs, {z.s, z.b});
  return z;
}

// Of sums over rows from each row on.
at::Tensor cumulated_from_end(const at::Tensor& x) { return x.flip(3).cumsum(3).flip(3); }

// See LastChunk.
DeltaOperands in_whole_chunks(const DeltaOperands& o, int64_t chunk) {
  const int64_t missing = (chunk - o.v.size(0) % chunk) % chunk;
  if (missing == 0) return o;
  const auto padded = [&](const at::Tensor& t) {
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes[0] = missing;
    return at::cat({t, at::zeros(sizes, t.options())});
  };
  DeltaOperands whole{padded(o.q), padded(o.k), padded(o.v), padded(o.g), padded(o.beta), o.runs};
  if (o.runs.defined())
    whole.runs = at::cat({o.runs, o.runs.narrow(0, o.runs.size(0) - 1, 1).expand({missing, -1})});
  return whole;
}

class DeltaRule {
 public:
  DeltaRule(const DeltaOperands& operands, const at::Tensor& run, int64_t chunk)
      : o_(operands), z_(sizes_of(operands)), chunk_(chunk), type_(accumulate_type(operands.v)) {
    MEGATRON_ASSERT(chunk > 0, "a delta rule in chunks of ", chunk, " rows");
    if (!o_.runs.defined()) return;
    run_ = run.defined() ? run : o_.runs.select(0, 0);
  }

  const DeltaSizes& sizes() const { return z_; }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(z_.K)); }
  int64_t num_chunks() const { return (z_.s + chunk_ - 1) / chunk_; }
  int64_t first(int64_t c) const { return c * chunk_; }
  int64_t rows(int64_t c) const { return std::min(chunk_, z_.s - first(c)); }
  at::TensorOptions options() const { return o_.v.options().dtype(type_); }

  at::Tensor grouped(const at::Tensor& state) const {
    if (!state.defined()) return at::zeros({z_.b, z_.Hk, z_.per_key(), z_.K, z_.V}, options());
    check_shape("state of a delta rule", state, {z_.b, z_.Hv, z_.K, z_.V});
    return state.to(type_).view({z_.b, z_.Hk, z_.per_key(), z_.K, z_.V});
  }
  at::Tensor by_head(const at::Tensor& state) const {
    return state.reshape({z_.b, z_.Hv, z_.K, state.size(-1)});
  }
  // [q, b, Hv, n] of a chunk -> [b, Hk, Hv/Hk, q, n]
  at::Tensor values(const at::Tensor& x, int64_t c) const {
    return x.narrow(0, first(c), rows(c))
        .permute({1, 2, 0, 3})
        .to(type_)
        .reshape({z_.b, z_.Hk, z_.per_key(), rows(c), x.size(3)});
  }
  // [q, b, Hk, K] of a chunk -> [b, Hk, 1, q, K]
  at::Tensor keys(const at::Tensor& x, int64_t c) const {
    return x.narrow(0, first(c), rows(c)).permute({1, 2, 0, 3}).to(type_).unsqueeze(2);
  }
  // The inverses, into rows of `out`.
  void put_values(const at::Tensor& x, int64_t c, const at::Tensor& out) const {
    const int64_t count = std::min(rows(c), out.size(0) - first(c));
    out.narrow(0, first(c), count)
        .copy_(x.reshape({z_.b, z_.Hv, rows(c), -1}).narrow(2, 0, count).permute({2, 0, 1, 3}));
  }
  void put_keys(const at::Tensor& x, int64_t c, const at::Tensor& out) const {
    out.narrow(0, first(c), rows(c)).copy_(x.sum(2).permute({2, 0, 1, 3}));
  }
  at::Tensor run_before(int64_t c) const { return c == 0 ? run_ : o_.runs.select(0, first(c) - 1); }

  struct Chunk {
    at::Tensor k, v, beta;  // beta [b, Hk, Hv/Hk, q, 1]
    at::Tensor D;           // [b, Hk, Hv/Hk, q, q]
    at::Tensor into;        // [b, Hk, Hv/Hk, q, 1]
    at::Tensor A;           // [b, Hk, Hv/Hk, q, q], below the diagonal
    at::Tensor rest() const { return D.select(3, D.size(3) - 1).unsqueeze(-1); }
    at::Tensor decay() const { return into.narrow(3, into.size(3) - 1, 1); }
    // (I + A)^-1 x, and (I + A)^-T x
    at::Tensor solved(const at::Tensor& x) const { return solve_unit_lower(A, x); }
    at::Tensor solved_transposed(const at::Tensor& x) const {
      return at::linalg_solve_triangular(A.mT(), x, /*upper=*/true, /*left=*/true,
                                         /*unitriangular=*/true);
    }
    at::Tensor writes(const at::Tensor& state) const {
      return solved(beta * (v - into * multiply_matrices(k, state)));
    }
    at::Tensor next(const at::Tensor& state, const at::Tensor& E) const {
      return decay() * state + multiply_matrices((rest() * k).mT(), E);
    }
  };
  Chunk chunk(int64_t c) const {
    const int64_t q = rows(c);
    Chunk chunk;
    chunk.k = keys(o_.k, c);
    chunk.v = values(o_.v, c);
    chunk.beta = values(o_.beta.unsqueeze(-1), c);
    const at::Tensor g = values(o_.g.unsqueeze(-1), c);
    const at::Tensor below = at::ones({q, q}, o_.v.options().dtype(at::kBool)).tril(-1);
    at::Tensor visible = at::ones({q, q}, below.options()).tril();
    chunk.into = at::exp(g.cumsum(3));
    if (o_.runs.defined()) {
      const at::Tensor runs = o_.runs.narrow(0, first(c), q).t();
      visible =
          visible.logical_and(runs.unsqueeze(2).eq(runs.unsqueeze(1))).view({z_.b, 1, 1, q, q});
      chunk.into.masked_fill_(runs.ne(run_before(c).unsqueeze(1)).view({z_.b, 1, 1, q, 1}), 0.0);
    }
    chunk.D = at::exp(at::where(below, g, at::zeros({}, g.options())).cumsum(3))
                  .masked_fill(visible.logical_not(), 0.0);
    chunk.A = (chunk.beta * multiply_matrices(chunk.k, chunk.k.mT()) * chunk.D).tril(-1);
    return chunk;
  }

  // What the state that entered a chunk, its writes and its values' errors get from the outputs,
  // dO, and from the state that leaves.
  struct StateGrads {
    at::Tensor dR;  // of beta (V - into (K S))
    at::Tensor dS;
  };
  StateGrads state_grads(const Chunk& chunk, const at::Tensor& q, const at::Tensor& dO,
                         const at::Tensor& dnext) const {
    const at::Tensor X = at::matmul(q, chunk.k.mT()) * chunk.D;
    const at::Tensor dE =
        scale() * at::matmul(X.mT(), dO) + at::matmul(chunk.rest() * chunk.k, dnext);
    StateGrads grads;
    grads.dR = chunk.solved_transposed(dE);
    grads.dS = chunk.decay() * dnext + scale() * at::matmul((chunk.into * q).mT(), dO) -
               at::matmul((chunk.into * chunk.beta * chunk.k).mT(), grads.dR);
    return grads;
  }

 private:
  const DeltaOperands& o_;
  const DeltaSizes z_;
  const int64_t chunk_;
  const at::ScalarType type_;
  at::Tensor run_;
};

// Each document by itself, as a sequence that is served.
DeltaResult rule_of_documents(const DeltaOperands& o, const ScanState& initial, int64_t chunk,
                              LastChunk last) {
  MEGATRON_ASSERT(!initial.state.defined(), "documents that begin in another part of the sequence");
  const at::Tensor out = at::empty(o.v.sizes(), o.v.options());
  std::vector<at::Tensor> states(static_cast<size_t>(o.v.size(1)));
  for (const DocumentRows& document : document_rows(o.runs)) {
    const DeltaOperands own{document.of(o.q), document.of(o.k),    document.of(o.v),
                            document.of(o.g), document.of(o.beta), {}};
    const DeltaResult result = delta_rule(own, {}, chunk, last);
    document.of(out).copy_(result.o);
    states[static_cast<size_t>(document.sequence)] = result.state;
  }
  return {out, at::cat(states)};
}

at::Tensor inverse_length(const at::Tensor& x) {
  return at::rsqrt(x.square().sum(-1, /*keepdim=*/true) + 1e-6);
}

ssm_kernels::DeltaTensors delta_tensors(const DeltaOperands& o, const ScanState& initial) {
  return {o.q, o.k, o.v, o.g, o.beta, o.runs, initial.state, initial.run};
}

}  // namespace

at::Tensor unit_length(const at::Tensor& x) {
  if (const auto y = ssm_kernels::unit_length(x)) return *y;
  const at::Tensor wide = x.to(accumulate_type(x));
  return wide * inverse_length(wide);
}

at::Tensor unit_length_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& dx) {
  if (const auto result = ssm_kernels::unit_length_backward(grad, x, dx))
    return placed(*result, dx);
  const at::Tensor wide = x.to(accumulate_type(x)), inverse = inverse_length(wide),
                   y = wide * inverse;
  return placed((inverse * (grad - y * (grad * y).sum(-1, /*keepdim=*/true))).to(x.scalar_type()),
                dx);
}

DeltaResult delta_rule(const DeltaOperands& given, const ScanState& initial, int64_t chunk_rows,
                       LastChunk last) {
  const at::NoGradGuard no_grad;
  if (is_batch_invariant() && given.runs.defined())
    return rule_of_documents(given, initial, chunk_rows, last);
  if (chunk_rows % ssm_kernels::kDeltaChunk == 0)
    if (const auto result = ssm_kernels::delta_rule(delta_tensors(given, initial)))
      return {result->o, result->state};
  const DeltaOperands o = last == LastChunk::kFilled ? in_whole_chunks(given, chunk_rows) : given;
  const DeltaRule rule(o, initial.run, chunk_rows);
  at::Tensor state = rule.grouped(initial.state), out = at::empty(given.v.sizes(), o.v.options());
  for (int64_t c = 0; c < rule.num_chunks(); ++c) {
    DeltaRule::Chunk chunk = rule.chunk(c);
    chunk.k = chunk.k.contiguous();
    chunk.v = chunk.v.contiguous();
    const at::Tensor q = rule.keys(o.q, c).contiguous(), E = chunk.writes(state);
    const at::Tensor scores = multiply_matrices(q, chunk.k.mT()) * chunk.D;
    rule.put_values(
        rule.scale() * (chunk.into * multiply_matrices(q, state) + multiply_matrices(scores, E)), c,
        out);
    state = chunk.next(state, E);
  }
  return {out, rule.by_head(state)};
}

DeltaResult delta_steps(const DeltaOperands& o, const ScanState& initial) {
  const at::NoGradGuard no_grad;
  const DeltaRule rule(o, initial.run, /*chunk=*/1);
  at::Tensor state = rule.grouped(initial.state), out = at::empty(o.v.sizes(), o.v.options());
  for (int64_t t = 0; t < rule.sizes().s; ++t) {
    const at::Tensor q = rule.keys(o.q, t), k = rule.keys(o.k, t);
    state = at::exp(rule.values(o.g.unsqueeze(-1), t)) * state;
    if (o.runs.defined())
      state.masked_fill_(o.runs.select(0, t).ne(rule.run_before(t)).view({-1, 1, 1, 1, 1}), 0.0);
    const at::Tensor e = rule.values(o.beta.unsqueeze(-1), t) *
                         (rule.values(o.v, t) - (k.mT() * state).sum(3, /*keepdim=*/true));
    state = state + k.mT() * e;
    rule.put_values(rule.scale() * (q.mT() * state).sum(3, /*keepdim=*/true), t, out);
  }
  return {out, rule.by_head(state)};
}

DeltaGrads delta_rule_backward(const at::Tensor& grad, const at::Tensor& dstate,
                               const DeltaOperands& o, const ScanState& initial, int64_t chunk_rows,
                               const DeltaOperands& places) {
  const at::NoGradGuard no_grad;
  const auto in_place = [&](DeltaGrads grads) {
    grads.v = placed(grads.v, places.v);
    grads.g = placed(grads.g, places.g);
    grads.beta = placed(grads.beta, places.beta);
    return grads;
  };
  if (chunk_rows % ssm_kernels::kDeltaChunk == 0)
    if (const auto d = ssm_kernels::delta_rule_backward(
            grad, dstate, delta_tensors(o, initial),
            {.q = {}, .k = {}, .v = places.v, .g = places.g, .beta = places.beta}))
      return in_place({d->q, d->k, d->v, d->g, d->beta, d->state});
  const DeltaRule rule(o, initial.run, chunk_rows);
  std::vector<at::Tensor> states = {rule.grouped(initial.state)};  // that enter each chunk
  for (int64_t c = 0; c + 1 < rule.num_chunks(); ++c) {
    const DeltaRule::Chunk chunk = rule.chunk(c);
    states.push_back(chunk.next(states.back(), chunk.writes(states.back())));
  }
  const auto empty = [&](const at::Tensor& like) {
    return at::empty(like.sizes(), like.options());
  };
  DeltaGrads grads{empty(o.q), empty(o.k), empty(o.v), {}, {}, {}};
  grads.g = at::empty(o.g.sizes(), rule.options());
  grads.beta = at::empty(o.beta.sizes(), rule.options());
  at::Tensor dnext = rule.grouped(dstate);
  for (int64_t c = rule.num_chunks(); c-- > 0;) {
    const DeltaRule::Chunk chunk = rule.chunk(c);
    const at::Tensor &k = chunk.k, &D = chunk.D, &into = chunk.into, &beta = chunk.beta;
    const at::Tensor& S = states[static_cast<size_t>(c)];
    const at::Tensor q = rule.keys(o.q, c), dO = rule.scale() * rule.values(grad, c);
    const at::Tensor kS = at::matmul(k, S), errors = chunk.v - into * kS;
    const at::Tensor E = chunk.solved(beta * errors);
    const auto [dR, dS] = rule.state_grads(chunk, q, rule.values(grad, c), dnext);
    const at::Tensor dX = at::matmul(dO, E.mT()), QK = at::matmul(q, k.mT()),
                     KK = at::matmul(k, k.mT());
    const at::Tensor dA = -at::matmul(dR, E.mT()).tril(-1);
    const at::Tensor dkS = -into * beta * dR, dnext_k = at::matmul(E, dnext.mT());
    const at::Tensor dKK = dA * beta * D;

    rule.put_keys(at::matmul(dX * D, k) + into * at::matmul(dO, S.mT()), c, grads.q);
    rule.put_keys(at::matmul((dX * D).mT(), q) + chunk.rest() * dnext_k + at::matmul(dkS, S.mT()) +
                      at::matmul(dKK + dKK.mT(), k),
                  c, grads.k);
    rule.put_values(beta * dR, c, grads.v);
    rule.put_values((dR * errors).sum(-1, true) + (dA * KK * D).sum(-1, true), c,
                    grads.beta.unsqueeze(-1));
    // Row t of g is in D[i, j] for j < t <= i, in into[i] for t <= i, in D[last, j] for j < t.
    const at::Tensor of_D = (dX * QK + dA * beta * KK) * D;
    const at::Tensor of_into =
        into * (dO * at::matmul(q, S)).sum(-1, true) + (dkS * kS).sum(-1, true);
    const at::Tensor of_rest = chunk.rest() * (dnext_k * k).sum(-1, true);
    rule.put_values(cumulated_from_end(of_D).tril(-1).sum(-1, true) + cumulated_from_end(of_into) +
                        of_rest.cumsum(3) - of_rest +
                        (chunk.decay() * dnext * S).sum(at::IntArrayRef({3, 4}), true),
                    c, grads.g.unsqueeze(-1));
    dnext = dS;
  }
  grads.state = rule.by_head(dnext);
  return in_place(std::move(grads));
}

DeltaSummary delta_summary(const DeltaOperands& o, const at::Tensor& run, int64_t chunk_rows) {
  const at::NoGradGuard no_grad;
  const DeltaRule rule(o, run, chunk_rows);
  const DeltaSizes& z = rule.sizes();
  const at::Tensor one = at::eye(z.K, rule.options());
  at::Tensor state = rule.grouped({});
  at::Tensor decay = one.expand({z.b, z.Hk, z.per_key(), z.K, z.K});
  for (int64_t c = 0; c < rule.num_chunks(); ++c) {
    const DeltaRule::Chunk chunk = rule.chunk(c);
    state = chunk.next(state, chunk.writes(state));
    const at::Tensor W = chunk.solved(chunk.beta * chunk.into * chunk.k);
    decay = at::matmul(chunk.decay() * one - at::matmul((chunk.rest() * chunk.k).mT(), W), decay);
  }
  return {rule.by_head(decay), rule.by_head(state)};
}

at::Tensor delta_state_grad(const at::Tensor& grad, const DeltaOperands& o, const at::Tensor& run,
                            int64_t chunk_rows) {
  const at::NoGradGuard no_grad;
  const DeltaRule rule(o, run, chunk_rows);
  at::Tensor dstate = rule.grouped({});
  for (int64_t c = rule.num_chunks(); c-- > 0;)
    dstate = rule.state_grads(rule.chunk(c), rule.keys(o.q, c), rule.values(grad, c), dstate).dS;
  return rule.by_head(dstate);
}

DeltaWrites delta_writes(const DeltaOperands& o, const at::Tensor& run) {
  const at::NoGradGuard no_grad;
  const DeltaRule rule(o, run, o.k.size(0));
  const DeltaSizes& z = rule.sizes();
  const DeltaRule::Chunk chunk = rule.chunk(0);
  return {chunk.solved(chunk.beta * chunk.v).reshape({z.b, z.Hv, z.s, z.V}),
          chunk.solved(chunk.beta * chunk.into * chunk.k).reshape({z.b, z.Hv, z.s, z.K})};
}

}  // namespace megatron
