// Attention over gathered keys and values.
#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/tensor/attention/attention_block.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/context_parallel/detail/context_parallel.h"

namespace megatron {
namespace {

// One of this rank's two chunks of queries, and the keys [first_key, first_key + num_keys) that it
// may see.
struct Half {
  int64_t first_query, num_queries, first_key, num_keys;
  int64_t first_distance;  // of these pairs, among those of the whole sequence
  AttentionOptions options;

  // The elements of a bias by distance, or of its gradient [n, 2 s - 1], that these pairs have.
  at::Tensor of_distances(const at::Tensor& whole) const {
    return whole.defined() ? whole.narrow(1, first_distance, num_queries + num_keys - 1) : whole;
  }
};

std::vector<Half> make_halves(const ContextParallelPass& pass, int64_t local,
                              const at::Device& device) {
  const AttentionOptions& o = pass.options;
  const int64_t c = pass.cp.size(), rank = pass.cp.rank(), chunk = local / 2, s = local * c;
  const at::Tensor all = pass.by_place() ? zigzag_positions(s, 1, 0, device) : at::Tensor();
  const auto positions = [&](int64_t first, int64_t count) {
    return all.defined() ? all.narrow(0, first, count) : all;
  };
  std::vector<Half> halves;
  for (const int64_t index : {rank, 2 * c - 1 - rank}) {
    Half half{index == rank ? 0 : chunk, chunk, 0, s, 0, {}};
    if (o.causal) {  // up to the chunk's last token, from where the window begins
      half.first_key = o.window_left < 0 ? 0 : std::max<int64_t>(0, index * chunk - o.window_left);
      half.num_keys = (index + 1) * chunk - half.first_key;
    }
    half.first_distance = s + half.first_key - (index + 1) * chunk;
    half.options = pass.block(o.causal, positions(index * chunk, chunk),
                              positions(half.first_key, half.num_keys));
    half.options.distance_bias = half.of_distances(o.distance_bias);
    halves.push_back(half);
  }
  return halves;
}

// Keys and values [s, b, g, d] of the whole sequence.
std::vector<at::Tensor> gather(const at::Tensor& k, const at::Tensor& v, const ProcessGroup& cp) {
  const Packed local = Packed::copy({k, v});
  at::Tensor all = at::empty({cp.size(), local.flat.numel()}, local.flat.options());
  cp.all_gather(all, local.flat)->wait();
  std::vector<at::Tensor> gathered;
  int64_t offset = 0;
  for (const at::Tensor& part : local.parts) {
    std::vector<int64_t> shape = part.sizes().vec();
    shape.insert(shape.begin(), cp.size());
    gathered.push_back(join_zigzag(all.narrow(1, offset, part.numel()).reshape(shape)));
    offset += part.numel();
  }
  return gathered;
}

// This rank's part of the sum over ranks of dk and dv [s, b, g, d].
std::vector<at::Tensor> reduce_scatter(const at::Tensor& dk, const at::Tensor& dv,
                                       const ProcessGroup& cp) {
  const int64_t c = cp.size();
  const at::Tensor dk_parts = split_zigzag(dk, c), dv_parts = split_zigzag(dv, c);
  Packed own({dk_parts.select(0, 0), dv_parts.select(0, 0)}, dk.scalar_type());
  cp.reduce_scatter(own.flat, at::cat({dk_parts.reshape({c, -1}), dv_parts.reshape({c, -1})}, 1))
      ->wait();
  return own.parts;
}

struct SavedGatherPass : torch::CustomClassHolder {
  ContextParallelPass pass;
};

// Keeps this rank's keys and values only; the backward gathers again.
class AllGatherAttention : public torch::autograd::Function<AllGatherAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const ContextParallelPass& pass) {
    auto saved = c10::make_intrusive<SavedGatherPass>();
    saved->pass = pass;
    const AttentionBlock total = attend(q, gather(k, v, pass.cp), pass);
    torch::autograd::variable_list tensors = {q, k, v};
    if (!pass.options.recompute) tensors.insert(tensors.end(), {total.out, total.lse});
    context->save_for_backward(tensors);
    context->saved_data["pass"] = c10::IValue::make_capsule(saved);
    return total.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = c10::static_intrusive_pointer_cast<SavedGatherPass>(
        context->saved_data["pass"].toCapsule());
    const ContextParallelPass& pass = saved->pass;
    const torch::autograd::variable_list t = context->get_saved_variables();
    const at::NoGradGuard no_grad;
    const at::Tensor& q = t[0];
    const std::vector<at::Tensor> kv = gather(t[1], t[2], pass.cp);
    const AttentionBlock total = t.size() == 3 ? attend(q, kv, pass) : AttentionBlock{t[3], t[4]};
    const auto sum_type = total.lse.options();
    at::Tensor dq = at::empty_like(q, at::MemoryFormat::Contiguous);
    at::Tensor dk = at::zeros(kv[0].sizes(), sum_type), dv = at::zeros(kv[1].sizes(), sum_type);
    const at::Tensor &bias = pass.options.distance_bias,
                     dbias = bias.defined() ? at::zeros_like(bias) : at::Tensor();
    for (const Half& half : make_halves(pass, q.size(0), q.device())) {
      const auto rows = [&](const at::Tensor& x) {
        return x.narrow(0, half.first_query, half.num_queries);
      };
      const auto keys = [&](const at::Tensor& x) {
        return x.narrow(0, half.first_key, half.num_keys);
      };
      const auto [dq_half, dk_half, dv_half] = attention_block_backward(
          rows(grads[0]), rows(q), keys(kv[0]), keys(kv[1]), rows(total.out),
          total.lse.narrow(2, half.first_query, half.num_queries), half.options,
          half.of_distances(dbias));
      rows(dq).copy_(dq_half);
      keys(dk).add_(dk_half);
      keys(dv).add_(dv_half);
    }
    const std::vector<at::Tensor> own = reduce_scatter(dk, dv, pass.cp);
    const at::Tensor& sinks = pass.options.sinks;
    return {dq,
            own[0].to(q.scalar_type()),
            own[1].to(q.scalar_type()),
            sinks.defined() ? attention_sinks_grad(grads[0], total.out, total.lse, sinks)
                            : at::Tensor(),
            dbias,
            {}};
  }

 private:
  // The output in q's type.
  static AttentionBlock attend(const at::Tensor& q, const std::vector<at::Tensor>& kv,
                               const ContextParallelPass& pass) {
    std::vector<at::Tensor> out, lse;
    for (const Half& half : make_halves(pass, q.size(0), q.device())) {
      const auto keys = [&](const at::Tensor& x) {
        return x.narrow(0, half.first_key, half.num_keys);
      };
      const AttentionBlock block = attention_block_forward(
          q.narrow(0, half.first_query, half.num_queries), keys(kv[0]), keys(kv[1]), half.options);
      if (pass.options.sinks.defined()) add_attention_sinks(block, pass.options.sinks);
      out.push_back(block.out.to(q.scalar_type()));
      lse.push_back(block.lse);
    }
    return {at::cat(out).contiguous(), at::cat(lse, 2)};
  }
};

}  // namespace

at::Tensor all_gather_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionOptions& options, const at::Tensor& document_ids,
                                const ProcessGroup& cp) {
  return AllGatherAttention::apply(q, k, v, std::optional<at::Tensor>(options.sinks),
                                   std::optional<at::Tensor>(options.distance_bias),
                                   ContextParallelPass{options, document_ids, cp});
}

}  // namespace megatron
