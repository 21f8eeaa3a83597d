#include "megatron/transformer/ssm/ssd_scan.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/document_rows.h"
#include "megatron/transformer/ssm/placed.h"
#include "megatron/transformer/ssm/uniform_math.h"

// Note [Chunks of a scan]
// With L[i, j] = exp(sum of dt A over rows j+1 .. i) for j <= i in one document, else 0, a chunk
// that the state S enters and S' leaves is
//
//   Y  = ((C B^T) * L) (dt x) + into (C S^T) + D x        into[i] = exp(sum over rows 0 .. i), or 0
//   S' = into[last] S + (L[last] dt x)^T B                where row i is not of the document of S
//
// The sums of L are cumulated from row j+1 for each j: differences of one cumulated sum would lose
// small terms behind large ones, and could become positive. Tensors inside a chunk of q rows have
// the shapes [b, G, H/G, q, ...]; what the heads of a group share has 1 in the place of H/G.

namespace megatron {
namespace {

// One head size for each of the dimensions above.
struct Sizes {
  int64_t s, b, H, P, G, N;
  int64_t per_group() const { return H / G; }
};

Sizes sizes_of(const ScanOperands& o) {
  const Sizes z{o.x.size(0), o.x.size(1), o.x.size(2), o.x.size(3), o.B.size(2), o.B.size(3)};
  MEGATRON_ASSERT(z.H % z.G == 0, z.H, " heads in ", z.G, " groups");
  check_shape("time steps of a scan", o.dt, {z.s, z.b, z.H});
  check_shape("B of a scan", o.B, {z.s, z.b, z.G, z.N});
  check_shape("C of a scan", o.C, {z.s, z.b, z.G, z.N});
  check_shape("A of a scan", o.A, {z.H});
  check_shape("D of a scan", o.D, {z.H});
  if (o.runs.defined()) check_shape("document runs of a scan", o.runs, {z.s, z.b});
  return z;
}

// See LastChunk.
ScanOperands in_whole_chunks(const ScanOperands& o, int64_t chunk) {
  const int64_t missing = (chunk - o.x.size(0) % chunk) % chunk;
  if (missing == 0) return o;
  const auto padded = [&](const at::Tensor& t) {
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes[0] = missing;
    return at::cat({t, at::zeros(sizes, t.options())});
  };
  ScanOperands whole{padded(o.x), padded(o.dt), o.A, padded(o.B), padded(o.C), o.D, o.runs};
  if (o.runs.defined())
    whole.runs = at::cat({o.runs, o.runs.narrow(0, o.runs.size(0) - 1, 1).expand({missing, -1})});
  return whole;
}

class Scan {
 public:
  Scan(const ScanOperands& operands, at::Tensor run, int64_t chunk)
      : o_(operands), z_(sizes_of(operands)), chunk_(chunk), type_(accumulate_type(operands.x)) {
    MEGATRON_ASSERT(chunk > 0, "a scan in chunks of ", chunk, " rows");
    A_ = o_.A.to(type_).view({1, z_.G, z_.per_group(), 1});
    D_ = o_.D.to(type_).view({1, z_.G, z_.per_group(), 1, 1});
    if (!o_.runs.defined()) return;
    run_ = run.defined() ? run : o_.runs.select(0, 0);
  }

  const Sizes& sizes() const { return z_; }
  const at::Tensor& A() const { return A_; }
  const at::Tensor& D() const { return D_; }
  int64_t num_chunks() const { return (z_.s + chunk_ - 1) / chunk_; }
  int64_t first(int64_t c) const { return c * chunk_; }
  int64_t rows(int64_t c) const { return std::min(chunk_, z_.s - first(c)); }

  at::Tensor zero_state() const {
    return at::zeros({z_.b, z_.G, z_.per_group(), z_.P, z_.N}, o_.x.options().dtype(type_));
  }
  at::Tensor grouped(const at::Tensor& state) const {
    if (!state.defined()) return zero_state();
    check_shape("state of a scan", state, {z_.b, z_.H, z_.P, z_.N});
    return state.to(type_).view({z_.b, z_.G, z_.per_group(), z_.P, z_.N});
  }
  at::Tensor by_head(const at::Tensor& state) const { return state.view({z_.b, z_.H, z_.P, z_.N}); }
  // [q, b, H, P] of a chunk -> [b, G, H/G, q, P]
  at::Tensor heads(const at::Tensor& x, int64_t c) const {
    return x.narrow(0, first(c), rows(c))
        .permute({1, 2, 0, 3})
        .to(type_)
        .reshape({z_.b, z_.G, z_.per_group(), rows(c), x.size(3)});
  }
  // [q, b, G, N] of a chunk -> [b, G, 1, q, N]
  at::Tensor groups(const at::Tensor& x, int64_t c) const {
    return x.narrow(0, first(c), rows(c)).permute({1, 2, 0, 3}).to(type_).unsqueeze(2);
  }
  // The inverses, into rows of `out`.
  void put_heads(const at::Tensor& x, int64_t c, const at::Tensor& out) const {
    const int64_t count = std::min(rows(c), out.size(0) - first(c));
    out.narrow(0, first(c), count)
        .copy_(x.reshape({z_.b, z_.H, rows(c), -1}).narrow(2, 0, count).permute({2, 0, 1, 3}));
  }
  void put_groups(const at::Tensor& x, int64_t c, const at::Tensor& out) const {
    out.narrow(0, first(c), rows(c)).copy_(x.sum(2).permute({2, 0, 1, 3}));
  }

  // The run [b] of the last row before a chunk.
  at::Tensor run_before(int64_t c) const { return c == 0 ? run_ : o_.runs.select(0, first(c) - 1); }

  struct Chunk {
    at::Tensor dt;    // [b, G, H/G, q]
    at::Tensor L;     // [b, G, H/G, q, q]
    at::Tensor into;  // [b, G, H/G, q, 1]
    at::Tensor rest() const { return L.select(3, L.size(3) - 1).unsqueeze(-1); }
    at::Tensor decay() const { return into.narrow(3, into.size(3) - 1, 1); }
  };
  Chunk chunk(int64_t c) const {
    const int64_t q = rows(c);
    Chunk chunk;
    chunk.dt = o_.dt.narrow(0, first(c), q)
                   .permute({1, 2, 0})
                   .to(type_)
                   .reshape({z_.b, z_.G, z_.per_group(), q});
    const at::Tensor steps = chunk.dt * A_;
    const at::Tensor below = at::ones({q, q}, o_.x.options().dtype(at::kBool)).tril(-1);
    at::Tensor visible = at::ones({q, q}, below.options()).tril();
    chunk.into = at::exp(steps.cumsum(3));
    if (o_.runs.defined()) {
      const at::Tensor runs = o_.runs.narrow(0, first(c), q).t();
      visible =
          visible.logical_and(runs.unsqueeze(2).eq(runs.unsqueeze(1))).view({z_.b, 1, 1, q, q});
      chunk.into.masked_fill_(runs.ne(run_before(c).unsqueeze(1)).view({z_.b, 1, 1, q}), 0.0);
    }
    chunk.into = chunk.into.unsqueeze(-1);
    chunk.L =
        at::exp(at::where(below, steps.unsqueeze(-1), at::zeros({}, steps.options())).cumsum(3))
            .masked_fill(visible.logical_not(), 0.0);
    return chunk;
  }

  at::Tensor weighted(const Chunk& chunk, int64_t c) const {
    return heads(o_.x, c) * chunk.dt.unsqueeze(-1);
  }
  at::Tensor next_state(const Chunk& chunk, const at::Tensor& xd, int64_t c,
                        const at::Tensor& state) const {
    return chunk.decay() * state + multiply_matrices((chunk.rest() * xd).mT(), groups(o_.B, c));
  }
  // Of the state that entered, from that of the state that leaves and of the outputs.
  at::Tensor state_grad(const Chunk& chunk, const at::Tensor& dy, int64_t c,
                        const at::Tensor& dstate) const {
    return chunk.decay() * dstate + at::matmul((chunk.into * dy).mT(), groups(o_.C, c));
  }

 private:
  const ScanOperands& o_;
  const Sizes z_;
  const int64_t chunk_;
  const at::ScalarType type_;
  at::Tensor A_, D_, run_;
};

ssm_kernels::ScanTensors scan_tensors(const ScanOperands& o, const ScanState& initial) {
  return {o.x, o.dt, o.A, o.B, o.C, o.D, o.runs, initial.state, initial.run};
}

// Each document by itself, as a sequence that is served.
ScanResult scan_of_documents(const ScanOperands& o, const ScanState& initial, int64_t chunk,
                             LastChunk last) {
  MEGATRON_ASSERT(!initial.state.defined(), "documents that begin in another part of the sequence");
  const at::Tensor y = at::empty(o.x.sizes(), o.x.options());
  std::vector<at::Tensor> states(static_cast<size_t>(o.x.size(1)));
  for (const DocumentRows& document : document_rows(o.runs)) {
    const ScanOperands own{
        document.of(o.x), document.of(o.dt), o.A, document.of(o.B), document.of(o.C), o.D, {}};
    const ScanResult result = ssd_scan(own, {}, chunk, last);
    document.of(y).copy_(result.y);
    states[static_cast<size_t>(document.sequence)] = result.state;
  }
  return {y, at::cat(states)};
}

}  // namespace

at::Tensor time_steps(const at::Tensor& r, const at::Tensor& bias, const TimeStepLimits& limits) {
  const at::ScalarType type = accumulate_type(r);
  return uniform_softplus(r.to(type) + bias.to(type)).clamp(limits.least, limits.most);
}

TimeStepGrads time_steps_backward(const at::Tensor& grad, const at::Tensor& r,
                                  const at::Tensor& bias, const TimeStepLimits& limits) {
  const at::ScalarType type = accumulate_type(r);
  const at::Tensor v = r.to(type) + bias.to(type), dt = uniform_softplus(v);
  const at::Tensor clipped = dt.lt(limits.least).logical_or(dt.gt(limits.most));
  const at::Tensor dr = (grad.to(type) * at::sigmoid(v)).masked_fill(clipped, 0.0);
  return {dr.to(r.scalar_type()), dr.sum(at::IntArrayRef({0, 1}))};
}

ScanResult ssd_scan(const ScanOperands& given, const ScanState& initial, int64_t chunk_rows,
                    LastChunk last) {
  const at::NoGradGuard no_grad;
  if (const auto result = ssm_kernels::ssd_scan(scan_tensors(given, initial)))
    return {result->y, result->state};
  if (is_batch_invariant() && given.runs.defined())
    return scan_of_documents(given, initial, chunk_rows, last);
  const ScanOperands o = last == LastChunk::kFilled ? in_whole_chunks(given, chunk_rows) : given;
  const Scan scan(o, initial.run, chunk_rows);
  at::Tensor state = scan.grouped(initial.state), y = at::empty(given.x.sizes(), o.x.options());
  for (int64_t c = 0; c < scan.num_chunks(); ++c) {
    const Scan::Chunk chunk = scan.chunk(c);
    const at::Tensor x = scan.heads(o.x, c), xd = scan.weighted(chunk, c).contiguous(),
                     B = scan.groups(o.B, c).contiguous(), C = scan.groups(o.C, c).contiguous();
    scan.put_heads(multiply_matrices(multiply_matrices(C, B.mT()) * chunk.L, xd) +
                       chunk.into * multiply_matrices(C, state.mT()) + scan.D() * x,
                   c, y);
    state = scan.next_state(chunk, xd, c, state);
  }
  return {y, scan.by_head(state)};
}

ScanResult ssd_steps(const ScanOperands& o, const ScanState& initial) {
  const at::NoGradGuard no_grad;
  if (const auto result = ssm_kernels::ssd_step(scan_tensors(o, initial)))
    return {result->y, result->state};
  const Scan scan(o, initial.run, /*chunk=*/1);
  at::Tensor state = scan.grouped(initial.state), y = at::empty(o.x.sizes(), o.x.options());
  for (int64_t t = 0; t < scan.sizes().s; ++t) {
    const at::Tensor x = scan.heads(o.x, t), dt = scan.heads(o.dt.unsqueeze(-1), t);
    state = at::exp(dt * scan.A().unsqueeze(-1)) * state;
    if (o.runs.defined())
      state.masked_fill_(o.runs.select(0, t).ne(scan.run_before(t)).view({-1, 1, 1, 1, 1}), 0.0);
    state += (dt * x).mT() * scan.groups(o.B, t);
    scan.put_heads((state * scan.groups(o.C, t)).sum(-1).unsqueeze(3) + scan.D() * x, t, y);
  }
  return {y, scan.by_head(state)};
}

ScanGrads ssd_scan_backward(const at::Tensor& dy, const at::Tensor& dstate, const ScanOperands& o,
                            const ScanState& initial, int64_t chunk_rows,
                            const ScanOperands& places) {
  const at::NoGradGuard no_grad;
  const auto in_place = [&](ScanGrads grads) {
    grads.x = placed(grads.x, places.x);
    grads.dt = placed(grads.dt, places.dt);
    grads.B = placed(grads.B, places.B);
    grads.C = placed(grads.C, places.C);
    return grads;
  };
  if (const auto g = ssm_kernels::ssd_scan_backward(
          dy, dstate, scan_tensors(o, initial),
          {.x = places.x, .dt = places.dt, .A = {}, .B = places.B, .C = places.C, .D = {}}))
    return in_place({g->x, g->dt, g->A, g->B, g->C, g->D, g->state});
  const Scan scan(o, initial.run, chunk_rows);
  std::vector<at::Tensor> states = {scan.grouped(initial.state)};  // that enter each chunk
  for (int64_t c = 0; c + 1 < scan.num_chunks(); ++c) {
    const Scan::Chunk chunk = scan.chunk(c);
    states.push_back(scan.next_state(chunk, scan.weighted(chunk, c), c, states.back()));
  }
  ScanGrads grads{at::empty(o.x.sizes(), o.x.options()),
                  at::empty(o.dt.sizes(), scan.A().options()),
                  at::zeros_like(scan.A()),
                  at::empty(o.B.sizes(), o.B.options()),
                  at::empty(o.C.sizes(), o.C.options()),
                  at::zeros_like(scan.D()),
                  {}};
  at::Tensor dS = scan.grouped(dstate);
  for (int64_t c = scan.num_chunks(); c-- > 0;) {
    const Scan::Chunk chunk = scan.chunk(c);
    const at::Tensor x = scan.heads(o.x, c), xd = scan.weighted(chunk, c), dY = scan.heads(dy, c),
                     B = scan.groups(o.B, c), C = scan.groups(o.C, c);
    const at::Tensor& S = states[static_cast<size_t>(c)];
    const at::Tensor M = at::matmul(C, B.mT()) * chunk.L, dM = at::matmul(dY, xd.mT());
    const at::Tensor dYS = chunk.into * at::matmul(dY, S),
                     BdS = chunk.rest() * at::matmul(B, dS.mT());
    const at::Tensor dxd = at::matmul(M.mT(), dY) + BdS, dCB = (dM * chunk.L).sum(2, true);
    scan.put_groups(at::matmul(dCB, B) + dYS.sum(2, true), c, grads.C);
    scan.put_groups(at::matmul(dCB.mT(), C) + at::matmul(chunk.rest() * xd, dS).sum(2, true), c,
                    grads.B);
    // Row t of dt A is in L[i, j] for j < t <= i, in into[i] for t <= i, in L[last, j] for j < t.
    const auto from = [](const at::Tensor& t) { return t.flip(3).cumsum(3).flip(3); };
    const at::Tensor later = (BdS * xd).sum(-1);
    const at::Tensor dsteps = from(dM * M).tril(-1).sum(-1) + from((dYS * C).sum(-1)) +
                              later.cumsum(3) - later +
                              (chunk.decay() * dS * S).sum(at::IntArrayRef({3, 4})).unsqueeze(-1);
    scan.put_heads(((dxd * x).sum(-1) + scan.A() * dsteps).unsqueeze(-1), c,
                   grads.dt.unsqueeze(-1));
    grads.A += (chunk.dt * dsteps).sum(at::IntArrayRef({0, 3}), true);
    scan.put_heads(chunk.dt.unsqueeze(-1) * dxd + scan.D() * dY, c, grads.x);
    grads.D += (dY * x).sum(at::IntArrayRef({0, 3, 4}), true);
    dS = scan.state_grad(chunk, dY, c, dS);
  }
  grads.A = grads.A.view({-1});
  grads.D = grads.D.view({-1});
  grads.state = scan.by_head(dS);
  return in_place(std::move(grads));
}

at::Tensor ssd_decay(const ScanOperands& o, const at::Tensor& run) {
  const at::NoGradGuard no_grad;
  at::Tensor decay = at::exp((o.dt * o.A).sum(0));
  if (!o.runs.defined()) return decay;
  const at::Tensor last = o.runs.select(0, o.runs.size(0) - 1);
  return decay.masked_fill(last.ne(run.defined() ? run : o.runs.select(0, 0)).unsqueeze(1), 0.0);
}

at::Tensor ssd_state(const ScanOperands& o, const at::Tensor& run, int64_t chunk_rows) {
  const at::NoGradGuard no_grad;
  if (const auto result = ssm_kernels::ssd_scan(scan_tensors(o, {{}, run}))) return result->state;
  const Scan scan(o, run, chunk_rows);
  at::Tensor state = scan.zero_state();
  for (int64_t c = 0; c < scan.num_chunks(); ++c) {
    const Scan::Chunk chunk = scan.chunk(c);
    state = scan.next_state(chunk, scan.weighted(chunk, c), c, state);
  }
  return scan.by_head(state);
}

at::Tensor ssd_state_grad(const at::Tensor& dy, const ScanOperands& o, const at::Tensor& run,
                          int64_t chunk_rows) {
  const at::NoGradGuard no_grad;
  if (const auto grads = ssm_kernels::ssd_scan_backward(dy, {}, scan_tensors(o, {{}, run}), {}))
    return grads->state;
  const Scan scan(o, run, chunk_rows);
  at::Tensor dstate = scan.zero_state();
  for (int64_t c = scan.num_chunks(); c-- > 0;)
    dstate = scan.state_grad(scan.chunk(c), scan.heads(dy, c), c, dstate);
  return scan.by_head(dstate);
}

}  // namespace megatron
