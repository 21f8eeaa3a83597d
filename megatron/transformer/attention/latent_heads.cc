#include "megatron/transformer/attention/latent_heads.h"

#include "megatron/tensor/rotary.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Views of the features of x [..., 2 r] as [..., r, 2]: (x0, x1), (x2, x3) .., and as [..., r, 2]
// with x0 .. of the first half beside those of the second one.
at::Tensor as_pairs(const at::Tensor& x) { return x.unflatten(-1, {x.size(-1) / 2, 2}); }
at::Tensor as_halves(const at::Tensor& x) {
  return x.unflatten(-1, {2, x.size(-1) / 2}).transpose(-1, -2);
}

// `to` = the rotation of `from`, both [s, b, n, rotated].
void rotate_into(const at::Tensor& from, const RotaryTables& rotary, const at::Tensor& to) {
  as_halves(to).copy_(as_pairs(from));
  rotate_(to, rotary.cos, rotary.sin, /*interleaved=*/false, 1.0);
}

// `to` = the gradient of the rotation's input, from that of its output.
void rotate_back_into(const at::Tensor& grad, const RotaryTables& rotary, const at::Tensor& to) {
  const at::Tensor halves = grad.clone(at::MemoryFormat::Contiguous);
  rotate_(halves, rotary.cos, rotary.sin, /*interleaved=*/false, -1.0);
  as_pairs(to).copy_(as_halves(halves));
}

struct SavedSizes : torch::CustomClassHolder {
  LatentHeadSizes sizes;
};

struct LatentHeadsFunction : torch::autograd::Function<LatentHeadsFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& shared, const LatentHeadSizes& sizes,
                               const RotaryTables& rotary) {
    auto saved = c10::make_intrusive<SavedSizes>();
    saved->sizes = sizes;
    context->saved_data["sizes"] = c10::IValue::make_capsule(saved);
    context->save_for_backward({rotary.cos, rotary.sin});
    const int64_t s = q.size(0), b = q.size(1), n = sizes.heads;
    const at::Tensor queries = q.view({s, b, n, sizes.query()}),
                     keys_values = kv.view({s, b, n, sizes.plain + sizes.value});
    at::Tensor out_q = at::empty(queries.sizes(), q.options()), out_k = at::empty_like(out_q);
    const auto plain = [&](const at::Tensor& t) { return t.narrow(3, 0, sizes.plain); };
    const auto rotated = [&](const at::Tensor& t) {
      return t.narrow(3, sizes.plain, sizes.rotated);
    };
    plain(out_q).copy_(plain(queries));
    rotate_into(rotated(queries), rotary, rotated(out_q));
    plain(out_k).copy_(plain(keys_values));
    rotated(out_k).copy_(rotate_pairs(shared.unsqueeze(2), rotary));
    return {out_q, out_k, keys_values.narrow(3, sizes.plain, sizes.value).contiguous()};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved =
        c10::static_intrusive_pointer_cast<SavedSizes>(context->saved_data["sizes"].toCapsule());
    const LatentHeadSizes& sizes = saved->sizes;
    const variable_list tables = context->get_saved_variables();
    const RotaryTables rotary{tables[0], tables[1]};
    const at::Tensor &dq = grads[0], &dk = grads[1], &dv = grads[2];
    const int64_t s = dq.size(0), b = dq.size(1), n = sizes.heads;
    const auto plain = [&](const at::Tensor& t) { return t.narrow(3, 0, sizes.plain); };
    const auto rotated = [&](const at::Tensor& t) {
      return t.narrow(3, sizes.plain, sizes.rotated);
    };
    at::Tensor queries = at::empty({s, b, n, sizes.query()}, dq.options()),
               keys_values = at::empty({s, b, n, sizes.plain + sizes.value}, dq.options()),
               shared = at::empty({s, b, 1, sizes.rotated}, dq.options());
    plain(queries).copy_(plain(dq));
    rotate_back_into(rotated(dq), rotary, rotated(queries));
    plain(keys_values).copy_(plain(dk));
    keys_values.narrow(3, sizes.plain, sizes.value).copy_(dv);
    rotate_back_into(rotated(dk).sum(2, /*keepdim=*/true), rotary, shared);
    return {queries.view({s, b, -1}), keys_values.view({s, b, -1}), shared.squeeze(2), {}, {}};
  }
};

}  // namespace

LatentHeads latent_heads(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& shared,
                         const LatentHeadSizes& sizes, const RotaryTables& rotary) {
  const int64_t s = q.size(0), b = q.size(1);
  check_shape("latent heads q", q, {s, b, sizes.heads * sizes.query()});
  check_shape("latent heads kv", kv, {s, b, sizes.heads * (sizes.plain + sizes.value)});
  check_shape("latent heads shared", shared, {s, b, sizes.rotated});
  const variable_list all = LatentHeadsFunction::apply(q, kv, shared, sizes, rotary);
  return {all[0], all[1], all[2]};
}

at::Tensor rotate_pairs(const at::Tensor& x, const RotaryTables& rotary) {
  at::Tensor rotated = at::empty(x.sizes(), x.options());
  rotate_into(x, rotary, rotated);
  return rotated;
}

}  // namespace megatron
