#include "megatron/tensor/attention/unpadded_attention.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/detail/attention_distance.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// -- sample by sample

// Which keys [b, 1, s, s_k] may NOT be attended to, of kinds [b, s_k].
at::Tensor mask_of_keys(const at::Tensor& kinds, int64_t queries) {
  const int64_t b = kinds.size(0), keys = kinds.size(1);
  return kinds.ne(static_cast<int64_t>(TokenKind::kText))
      .view({b, 1, 1, keys})
      .expand({b, 1, queries, keys});
}

// What of the options belongs to sample i.
AttentionOptions options_of_sample(const AttentionOptions& all, size_t i, int64_t begin,
                                   int64_t key_begin, const AttendedRows& rows) {
  const UnpaddedRows &queries = *rows.queries, &keys = rows.of_keys();
  const int64_t length = queries.lengths[i], key_length = keys.lengths[i];
  AttentionOptions one = all;
  one.place = {queries.sample.narrow(0, begin, 1), queries.position.narrow(0, begin, length)};
  one.key_position = keys.position.narrow(0, key_begin, key_length);
  if (keys.holes[i]) {
    const at::Tensor kinds =
        keys.kinds.narrow(0, static_cast<int64_t>(i), 1).narrow(1, 0, key_length);
    one.mask = rows.keys == nullptr ? mask_of_kinds(kinds) : mask_of_keys(kinds, length);
  }
  if (all.distance_bias.defined())
    one.distance_bias =
        all.distance_bias.narrow(1, queries.length - length, length + key_length - 1);
  return one;
}

// Lengths of the texts, and the number of empty rows behind them.
std::vector<int64_t> parts_of(const UnpaddedRows& rows) {
  std::vector<int64_t> parts = rows.lengths;
  int64_t empty = rows.rows;
  for (const int64_t length : parts) empty -= length;
  parts.push_back(empty);
  return parts;
}

at::Tensor attention_by_samples(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttendedRows& rows, const AttentionOptions& options) {
  const std::vector<int64_t> parts = parts_of(*rows.queries), key_parts = parts_of(rows.of_keys());
  const std::vector<at::Tensor> qs = q.split_with_sizes(parts), ks = k.split_with_sizes(key_parts),
                                vs = v.split_with_sizes(key_parts);
  std::vector<at::Tensor> out;
  int64_t begin = 0, key_begin = 0;
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    out.push_back(
        core_attention(qs[i], ks[i], vs[i], options_of_sample(options, i, begin, key_begin, rows)));
    begin += parts[i];
    key_begin += key_parts[i];
  }
  out.push_back(at::zeros({parts.back(), 1, q.size(2), v.size(3)}, q.options()));
  return at::cat(out);
}

// -- ranges of rows

RowRanges ranges_of(const UnpaddedRows& rows) {
  return {rows.offsets, rows.counts, rows.most > 0 ? rows.most : rows.length, rows.step};
}

QueryKeyRanges ranges_of(const AttendedRows& rows) {
  return {ranges_of(*rows.queries), ranges_of(rows.of_keys())};
}

// Why cuDNN does not compute these ranges, or "". q [R, n, d], k and v [R_k, g, d].
std::string why_not_ranges(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttendedRows& rows, const AttentionOptions& options) {
  if (!q.is_cuda()) return "it needs a CUDA device";
  if (options.sinks.defined()) return "sinks are given";
  if (rows.of_keys().length != rows.queries->length && options.causal)
    return "queries and keys differ in number";
  const std::string reason = why_unfused(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), options,
                                         /*knows_windows=*/rows.keys == nullptr);
  return reason.empty() ? why_not_cudnn_ranges(q, k, v, ranges_of(rows), options) : reason;
}

// What computes ranges of rows; kUniform: cuDNN, as samples of one length; kNone: samples are
// padded, or computed one by one.
enum class RangeKernel { kNone, kCudnn, kUniform, kDistance };

// Uniform rows [R, n, d] as samples [b, n, s, d].
at::Tensor as_samples(const at::Tensor& x, const UnpaddedRows& rows) {
  return x.unflatten(0, {rows.samples, rows.length}).transpose(1, 2);
}

bool is_uniform(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttendedRows& rows, const AttentionOptions& options) {
  const UnpaddedRows& queries = *rows.queries;
  return queries.uniform && rows.keys == nullptr &&
         why_not_cudnn(as_samples(q, queries), as_samples(k, queries), as_samples(v, queries),
                       options)
             .empty();
}

RangeKernel choose_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttendedRows& rows, const AttentionOptions& options) {
  const bool automatic = options.backend == AttentionBackend::kAuto;
  if (!automatic && options.backend != AttentionBackend::kFused) return RangeKernel::kNone;
  const bool holes = rows.queries->has_holes() || rows.of_keys().has_holes();
  if (automatic && (holes || !q.is_cuda())) return RangeKernel::kNone;
  if (automatic && rows.queries->step == 1 &&
      why_not_distance_kernel(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), options,
                              rows.of_keys().length)
          .empty())
    return RangeKernel::kDistance;
  const std::string reason = why_not_ranges(q, k, v, rows, options);
  MEGATRON_CHECK(automatic || reason.empty(),
                 "--attention-backend fused cannot compute this attention: ", reason,
                 "\nhint: --attention-backend auto takes a backend that can");
  if (!reason.empty() || holes) return RangeKernel::kNone;
  return is_uniform(q, k, v, rows, options) ? RangeKernel::kUniform : RangeKernel::kCudnn;
}

// All of [R, 1, n, d]: what is computed where no kernel does it.
at::Tensor attention_of_samples(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttendedRows& rows, const AttentionOptions& options) {
  return q.is_cuda() ? attention_with_padding(q, k, v, rows, options)
                     : attention_by_samples(q, k, v, rows, options);
}

// A tensor of rows that a kernel writes, except for the empty ones.
at::Tensor clear_empty(const at::Tensor& rows_of_tensor, const UnpaddedRows& rows) {
  const int64_t most = std::min(rows.most_empty, rows.rows);
  rows_of_tensor.narrow(0, rows.rows - most, most).zero_();
  return rows_of_tensor;
}

// -- one pass

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Queried {
  at::Tensor q, k, v;  // [R, n, d], [R_k, g, d], [R_k, g, v]
};

// Carries what a pass knows through autograd's context.
struct UnpaddedPass : torch::CustomClassHolder {
  UnpaddedPass(const Queried& t, const AttendedRows& of, const AttentionOptions& given)
      : options(given),
        rows(of),
        ranges(ranges_of(of)),
        kernel(choose_kernel(t.q, t.k, t.v, of, given)) {}
  AttentionOptions options;
  AttendedRows rows;
  QueryKeyRanges ranges;
  RangeKernel kernel;
};
using PassPtr = c10::intrusive_ptr<UnpaddedPass>;

struct RangesForward {
  at::Tensor out;  // [R, n, v]
  at::Tensor lse;  // of ranges
};

RangesForward run_forward(const Queried& t, const UnpaddedPass& pass) {
  const at::NoGradGuard no_grad;
  if (pass.kernel == RangeKernel::kNone)
    return {attention_of_samples(t.q.unsqueeze(1), t.k.unsqueeze(1), t.v.unsqueeze(1), pass.rows,
                                 pass.options)
                .squeeze(1),
            {}};
  const at::Tensor out = clear_empty(
      at::empty({t.q.size(0), t.q.size(1), t.v.size(2)}, t.q.options()), *pass.rows.queries);
  if (pass.kernel == RangeKernel::kUniform) {
    const auto samples = [&](const at::Tensor& x) { return as_samples(x, *pass.rows.queries); };
    return {out, cudnn_attention_forward(samples(t.q), samples(t.k), samples(t.v), samples(out),
                                         pass.options)};
  }
  if (pass.kernel == RangeKernel::kDistance)
    return {out, distance_attention_forward(t.q, t.k, t.v, out, pass.options, &pass.ranges)};
  return {out, cudnn_ranges_forward(t.q, t.k, t.v, out, pass.ranges, pass.options)};
}

// Saves the inputs, and what the backward needs of a forward of ranges unless it is recomputed.
void save(AutogradContext* context, const PassPtr& pass, variable_list inputs,
          const RangesForward& f) {
  if (pass->kernel != RangeKernel::kNone && !pass->options.recompute)
    inputs.insert(inputs.end(), {f.out, f.lse});
  context->save_for_backward(inputs);
  context->saved_data["pass"] = c10::IValue::make_capsule(pass);
}

PassPtr pass_of(const AutogradContext& context) {
  return c10::static_intrusive_pointer_cast<UnpaddedPass>(
      context.saved_data.at("pass").toCapsule());
}

struct OptionGrads {
  at::Tensor sinks, distance_bias;  // undefined: none
};

// Assigns the gradients into `grads`. Samples are computed again, with the gradients of their own
// options: the forward has kept nothing of them.
OptionGrads run_backward(const at::Tensor& dout, const Queried& t, const variable_list& saved,
                         size_t inputs, const UnpaddedPass& pass, const Queried& grads) {
  if (pass.kernel != RangeKernel::kNone) {
    const at::NoGradGuard no_grad;
    const RangesForward f = saved.size() > inputs ? RangesForward{saved[inputs], saved[inputs + 1]}
                                                  : run_forward(t, pass);
    clear_empty(grads.q, *pass.rows.queries);
    for (const at::Tensor& grad : {grads.k, grads.v}) clear_empty(grad, pass.rows.of_keys());
    if (pass.kernel == RangeKernel::kCudnn) {
      cudnn_ranges_backward(dout, t.q, t.k, t.v, f.out, f.lse, grads.q, grads.k, grads.v,
                            pass.ranges, pass.options);
      return {};
    }
    if (pass.kernel == RangeKernel::kUniform) {
      const auto samples = [&](const at::Tensor& x) { return as_samples(x, *pass.rows.queries); };
      cudnn_attention_backward(samples(dout), samples(t.q), samples(t.k), samples(t.v),
                               samples(f.out), f.lse, samples(grads.q), samples(grads.k),
                               samples(grads.v), pass.options);
      return {};
    }
    const at::Tensor& bias = pass.options.distance_bias;
    const at::Tensor dbias =
        bias.defined() ? at::zeros_like(bias, {}, at::MemoryFormat::Contiguous) : at::Tensor();
    distance_attention_backward(dout, t.q, t.k, t.v, f.out, f.lse, {grads.q, grads.k, grads.v},
                                dbias, pass.options, &pass.ranges);
    return {{}, dbias};
  }
  const c10::AutoGradMode with_grad(true);
  const auto leaf = [](const at::Tensor& x) {
    return x.defined() ? x.detach().requires_grad_() : at::Tensor();
  };
  const at::Tensor q = leaf(t.q.unsqueeze(1)), k = leaf(t.k.unsqueeze(1)),
                   v = leaf(t.v.unsqueeze(1));
  AttentionOptions options = pass.options;
  options.sinks = leaf(options.sinks);
  options.distance_bias = leaf(options.distance_bias);
  attention_of_samples(q, k, v, pass.rows, options).backward(dout.unsqueeze(1));
  const at::NoGradGuard no_grad;
  grads.q.copy_(q.grad().squeeze(1));
  grads.k.copy_(k.grad().squeeze(1));
  grads.v.copy_(v.grad().squeeze(1));
  const auto grad_of = [](const at::Tensor& x) { return x.defined() ? x.grad() : at::Tensor(); };
  return {grad_of(options.sinks), grad_of(options.distance_bias)};
}

// The sinks and the bias are also arguments of their own, which autograd sees.
struct UnpaddedFunction : torch::autograd::Function<UnpaddedFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, const AttendedRows& rows,
                            const AttentionOptions& options) {
    const Queried t{q, k, v};
    const auto pass = c10::make_intrusive<UnpaddedPass>(t, rows, options);
    const RangesForward f = run_forward(t, *pass);
    save(context, pass, {q, k, v}, f);
    return f.out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Queried t{saved[0], saved[1], saved[2]};
    const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
    const Queried into{like(t.q), like(t.k), like(t.v)};
    const OptionGrads others =
        run_backward(grads[0].contiguous(), t, saved, 3, *pass_of(*context), into);
    return {into.q, into.k, into.v, others.sinks, others.distance_bias, {}, {}};
  }
};

// Queries, keys and values of packed projections [s, b, g * (r + 2) * d], R = s b rows; queries of
// several heads for a group are a copy.
struct PackedRows {
  PackedRows(const at::Tensor& packed, const PackedHeads& heads)
      : length(packed.size(0)),
        all(packed.view({-1, heads.groups, heads.heads_per_group + 2, heads.head_size})) {
    const int64_t r = heads.heads_per_group;
    parts.q = r == 1
                  ? all.select(2, 0)
                  : all.narrow(2, 0, r).reshape({all.size(0), heads.groups * r, heads.head_size});
    parts.k = all.select(2, r);
    parts.v = all.select(2, r + 1);
  }
  void turn(const RotaryAngles& rotary, double sign) const {
    if (!rotary.cos.defined()) return;
    const at::Tensor rows = all.view({length, -1, all.size(2), all.size(3)});
    rotate_(rows.narrow(2, 0, all.size(2) - 1), rotary.cos, rotary.sin, rotary.interleaved, sign);
  }
  int64_t length;  // s
  at::Tensor all;  // [R, g, r + 2, d]
  Queried parts;
};

struct PackedUnpaddedFunction : torch::autograd::Function<PackedUnpaddedFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& flat,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const PackedHeads& heads, const RotaryAngles& rotary,
                            const AttendedRows& rows, const AttentionOptions& options) {
    PackedRows(flat, heads).turn(rotary, 1.0);
    const PackedRows packed(flat, heads);
    const auto pass = c10::make_intrusive<UnpaddedPass>(packed.parts, rows, options);
    const RangesForward f = run_forward(packed.parts, *pass);
    save(context, pass, {flat, rotary.cos, rotary.sin}, f);
    context->saved_data["groups"] = heads.groups;
    context->saved_data["r"] = heads.heads_per_group;
    context->saved_data["interleaved"] = rotary.interleaved;
    return f.out.view({flat.size(0), flat.size(1), -1});
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& flat = saved[0];
    PackedHeads heads{context->saved_data["groups"].toInt(), context->saved_data["r"].toInt(), 0};
    heads.head_size = flat.size(2) / (heads.groups * (heads.heads_per_group + 2));
    const PackedRows packed(flat, heads);
    const at::Tensor dflat = at::empty_like(flat);
    const PackedRows into(dflat, heads);
    const at::Tensor dout =
        grads[0].contiguous().view({-1, packed.parts.q.size(1), heads.head_size});
    const OptionGrads others =
        run_backward(dout, packed.parts, saved, 3, *pass_of(*context), into.parts);
    if (heads.heads_per_group > 1)  // a copy
      into.all.narrow(2, 0, heads.heads_per_group)
          .copy_(into.parts.q.view({-1, heads.groups, heads.heads_per_group, heads.head_size}));
    into.turn({saved[1], saved[2], context->saved_data["interleaved"].toBool()}, -1.0);
    return {dflat, others.sinks, others.distance_bias, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor attention_with_padding(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttendedRows& rows, const AttentionOptions& options) {
  const UnpaddedRows &queries = *rows.queries, &keys = rows.of_keys();
  AttentionOptions all = options;
  const auto positions = [](const UnpaddedRows& of) {
    return at::arange(of.length, of.position.options());
  };
  all.place = {queries.sample.index_select(0, queries.first), positions(queries)};
  all.key_position = positions(keys);
  all.mask =
      rows.keys == nullptr ? mask_of_kinds(keys.kinds) : mask_of_keys(keys.kinds, queries.length);
  if (all.backend == AttentionBackend::kFused) all.backend = AttentionBackend::kAuto;  // holes
  const at::Tensor out =
      core_attention(queries.with_padding(q.squeeze(1)), keys.with_padding(k.squeeze(1)),
                     keys.with_padding(v.squeeze(1)), all);
  return take_rows(out.transpose(0, 1).reshape(
                       {queries.samples * queries.length, out.size(2), out.size(3)}),
                   queries.places)
      .unsqueeze(1);
}

at::Tensor unpadded_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttendedRows& rows, const AttentionOptions& options) {
  check_shape("attention q without padding", q, {rows.queries->rows, 1, -1, -1});
  check_shape("attention k without padding", k, {rows.of_keys().rows, 1, -1, q.size(3)});
  return UnpaddedFunction::apply(q.squeeze(1), k.squeeze(1), v.squeeze(1),
                                 std::optional<at::Tensor>(options.sinks),
                                 std::optional<at::Tensor>(options.distance_bias), rows, options)
      .unsqueeze(1);
}

at::Tensor unpadded_packed_attention(const at::Tensor& packed, const PackedHeads& heads,
                                     const RotaryAngles& rotary, const AttendedRows& rows,
                                     const AttentionOptions& options) {
  if (rows.queries->samples == 0)
    return packed.narrow(2, 0, heads.groups * heads.heads_per_group * heads.head_size);
  check_shape(
      "packed attention without padding", packed,
      {rows.queries->rows, 1, heads.groups * (heads.heads_per_group + 2) * heads.head_size});
  MEGATRON_ASSERT(packed.is_contiguous() && rows.keys == nullptr,
                  "packed attention over a tensor with gaps, or over other keys");
  return PackedUnpaddedFunction::apply(packed, std::optional<at::Tensor>(options.sinks),
                                       std::optional<at::Tensor>(options.distance_bias), heads,
                                       rotary, rows, options);
}

std::optional<at::Tensor> packed_attention_of_documents(const at::Tensor& packed,
                                                        const PackedHeads& heads,
                                                        const RotaryAngles& rotary,
                                                        const AttendedRows& documents,
                                                        const AttentionOptions& options) {
  MEGATRON_ASSERT(packed.is_contiguous(), "packed attention over a tensor with gaps");
  const at::Tensor all =
      packed.view({-1, heads.groups, heads.heads_per_group + 2, heads.head_size});
  const at::Tensor q = at::empty(
      {all.size(0), heads.groups * heads.heads_per_group, heads.head_size}, packed.options());
  if (choose_kernel(q, all.select(2, heads.heads_per_group),
                    all.select(2, heads.heads_per_group + 1), documents,
                    options) == RangeKernel::kNone)
    return std::nullopt;
  return PackedUnpaddedFunction::apply(packed, std::optional<at::Tensor>(options.sinks),
                                       std::optional<at::Tensor>(options.distance_bias), heads,
                                       rotary, documents, options);
}

std::optional<at::Tensor> attention_of_documents(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v, const AttendedRows& documents,
                                                 const AttentionOptions& options) {
  const int64_t s = q.size(0), b = q.size(1);
  const auto rows = [&](const at::Tensor& t) { return t.reshape({s * b, t.size(2), t.size(3)}); };
  const at::Tensor queries = rows(q), keys = rows(k), values = rows(v);
  if (choose_kernel(queries, keys, values, documents, options) == RangeKernel::kNone)
    return std::nullopt;
  return UnpaddedFunction::apply(queries, keys, values, std::optional<at::Tensor>(options.sinks),
                                 std::optional<at::Tensor>(options.distance_bias), documents,
                                 options)
      .view({s, b, q.size(2), v.size(3)});
}

}  // namespace megatron
