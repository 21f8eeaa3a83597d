// All-to-all (DeepSpeed Ulysses): before attention each of the a ranks of the group sends all but
// n/a heads of its tokens and receives the tokens of all ranks for its own n/a heads; after
// attention the inverse.
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/detail/context_parallel.h"

namespace megatron {
namespace {

using torch::autograd::variable_list;

// [l, b, n_i, d_i] -> [a l, b, n_i / a, d_i], in one all-to-all.
variable_list tokens_for_heads(const variable_list& xs, const ProcessGroup& group) {
  const int64_t a = group.size(), l = xs[0].size(0), b = xs[0].size(1);
  std::vector<at::Tensor> by_rank;
  std::vector<int64_t> widths;
  for (const at::Tensor& x : xs) {
    by_rank.push_back(x.reshape({l, b, a, -1}).permute({2, 0, 1, 3}));
    widths.push_back(by_rank.back().size(3));
  }
  const at::Tensor send = at::cat(by_rank, 3).contiguous();
  at::Tensor received = at::empty(send.sizes(), send.options());
  const std::vector<int64_t> one_each(static_cast<size_t>(a), 1);
  group.all_to_all(received, one_each, send, one_each)->wait();
  variable_list out = join_zigzag(received).split_with_sizes(widths, 2);
  for (size_t i = 0; i < xs.size(); ++i)
    out[i] = out[i].reshape({a * l, b, xs[i].size(2) / a, xs[i].size(3)});
  return out;
}

// The inverse: [a l, b, m_i, d_i] -> [l, b, a m_i, d_i].
variable_list heads_for_tokens(const variable_list& xs, const ProcessGroup& group) {
  const int64_t a = group.size(), l = xs[0].size(0) / a, b = xs[0].size(1);
  std::vector<at::Tensor> flat;
  std::vector<int64_t> widths;
  for (const at::Tensor& x : xs) {
    flat.push_back(x.reshape({a * l, b, -1}));
    widths.push_back(flat.back().size(2));
  }
  const at::Tensor send = split_zigzag(at::cat(flat, 2), a).contiguous();
  at::Tensor received = at::empty(send.sizes(), send.options());
  const std::vector<int64_t> one_each(static_cast<size_t>(a), 1);
  group.all_to_all(received, one_each, send, one_each)->wait();
  variable_list out = received.split_with_sizes(widths, 3);
  for (size_t i = 0; i < xs.size(); ++i)
    out[i] = out[i].permute({1, 2, 0, 3}).reshape({l, b, a * xs[i].size(2), xs[i].size(3)});
  return out;
}

struct SavedGroup : torch::CustomClassHolder {
  ProcessGroup group;
};

// Forward in one direction, backward in the other.
struct Exchange : torch::autograd::Function<Exchange> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList xs,
                               const ProcessGroup& group, bool to_heads) {
    auto saved = c10::make_intrusive<SavedGroup>();
    saved->group = group;
    context->saved_data["group"] = c10::IValue::make_capsule(saved);
    context->saved_data["to_heads"] = to_heads;
    return to_heads ? tokens_for_heads(xs.vec(), group) : heads_for_tokens(xs.vec(), group);
  }
  static variable_list backward(torch::autograd::AutogradContext* context, variable_list grads) {
    const auto saved =
        c10::static_intrusive_pointer_cast<SavedGroup>(context->saved_data["group"].toCapsule());
    const bool to_heads = context->saved_data["to_heads"].toBool();
    const at::NoGradGuard no_grad;
    variable_list out =
        to_heads ? heads_for_tokens(grads, saved->group) : tokens_for_heads(grads, saved->group);
    out.resize(out.size() + 2);
    return out;
  }
};

// Repeats key and value heads until their number is divisible by the group size. Each rank then has
// the heads that its queries need; the gradients of the copies are summed.
at::Tensor repeat_heads(const at::Tensor& x, int64_t heads) {
  const int64_t r = heads / x.size(2);
  if (r == 1) return x;
  return x.unsqueeze(3)
      .expand({-1, -1, -1, r, -1})
      .reshape({x.size(0), x.size(1), heads, x.size(3)});
}

}  // namespace

at::Tensor all_to_all_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionOptions& options, const ProcessGroup& a2a,
                                const Attend& attend) {
  if (a2a.size() == 1) return attend(q, k, v, options);
  const std::string reason = why_heads_do_not_divide(q.size(2), a2a.size());
  MEGATRON_CHECK(reason.empty(), reason);
  // Divides the number of query heads, as both arguments do.
  const int64_t key_heads = std::lcm(k.size(2), static_cast<int64_t>(a2a.size()));
  const variable_list inputs = {q, repeat_heads(k, key_heads), repeat_heads(v, key_heads)};
  const variable_list qkv = Exchange::apply(at::TensorList(inputs), a2a, /*to_heads=*/true);
  AttentionOptions own = options;
  const int64_t heads = qkv[0].size(2), first = a2a.rank() * heads;
  own.first_head += first;
  if (options.sinks.defined()) own.sinks = options.sinks.narrow(0, first, heads);
  if (options.distance_bias.defined())
    own.distance_bias = options.distance_bias.narrow(0, first, heads);
  const at::Tensor y = attend(qkv[0], qkv[1], qkv[2], own);
  return Exchange::apply(at::TensorList(y), a2a, /*to_heads=*/false)[0];
}

}  // namespace megatron
