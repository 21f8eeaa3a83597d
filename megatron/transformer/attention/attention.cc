#include "megatron/transformer/attention/attention.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t qkv_rows(const TransformerConfig& config) {
  return (config.num_attention_heads * (config.attention_output_gate ? 2 : 1) +
          2 * config.query_groups()) *
         config.kv_channels;
}

LinearOptions qkv_options(const TransformerConfig& config, int64_t layer_number,
                          bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = config.qkv_bias();
  if (!config.keys_with_bias) {
    const int64_t d = config.kv_channels,
                  queries = qkv_rows(config) / config.query_groups() - 2 * d;
    options.bias_zeros = {queries + 2 * d, queries, d};
  }
  options.init = config.weight_init(qkv_rows(config), config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  options.input_norm = norms_attention_input(config, layer_number);
  options.norm = norm_options(config);
  options.recompute_norm = config.recomputes("layernorm");
  options.lora = lora_options(config, "linear_qkv");
  return options;
}

// [s, b, g * (r + 2) * d] -> q [s, b, g * r, d], k and v [s, b, g, d] without a copy where strides
// allow; of [s, b, g * (2 r + 2) * d] also the gate, as q. One function, so that the backward
// writes each gradient once into one buffer.
struct SplitQKV : torch::autograd::Function<SplitQKV> {
  static variable_list forward(AutogradContext* context, const at::Tensor& mixed, int64_t groups,
                               int64_t heads_per_group, int64_t head_size, bool gated) {
    const int64_t s = mixed.size(0), b = mixed.size(1), r = heads_per_group, d = head_size;
    const int64_t keys = gated ? 2 * r : r;
    context->saved_data["r"] = r;
    const at::Tensor view = mixed.view({s, b, groups, keys + 2, d});
    const auto heads = [&](int64_t first) {
      const at::Tensor part = view.narrow(3, first, r);
      return r == 1 ? part.select(3, 0) : part.reshape({s, b, groups * r, d});
    };
    variable_list parts = {heads(0), view.select(3, keys), view.select(3, keys + 1)};
    if (gated) parts.push_back(heads(r));
    return parts;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const int64_t r = context->saved_data["r"].toInt();
    const at::Tensor& dk = grads[1];
    const int64_t s = dk.size(0), b = dk.size(1), groups = dk.size(2), d = dk.size(3);
    const int64_t keys = grads.size() > 3 ? 2 * r : r;
    at::Tensor dmixed = at::empty({s, b, groups, keys + 2, d}, dk.options());
    dmixed.narrow(3, 0, r).copy_(grads[0].view({s, b, groups, r, d}));
    if (keys > r) dmixed.narrow(3, r, r).copy_(grads[3].view({s, b, groups, r, d}));
    dmixed.select(3, keys).copy_(dk);
    dmixed.select(3, keys + 1).copy_(grads[2]);
    return {dmixed.flatten(2), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// y sigmoid(gate), in fp32 (fp64).
struct OutputGate : torch::autograd::Function<OutputGate> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& y, const at::Tensor& gate) {
    context->save_for_backward({y, gate});
    const at::ScalarType type = accumulate_type(y);
    return (y.to(type) * at::sigmoid(gate.to(type))).to(y.scalar_type());
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::ScalarType type = accumulate_type(saved[0]);
    const at::Tensor d = grads[0].to(type), s = at::sigmoid(saved[1].to(type));
    return {(d * s).to(saved[0].scalar_type()),
            (d * saved[0].to(type) * s * (1.0 - s)).to(saved[1].scalar_type())};
  }
};

// Number of key/value groups that this rank attends with: its share, or one that it shares with
// other ranks.
int64_t groups_per_rank(int64_t groups, int ranks) {
  if (groups >= ranks) return per_rank("--num-query-groups", groups, ranks);
  MEGATRON_CHECK(ranks % groups == 0, ranks,
                 " tensor-parallel ranks are not divisible by --num-query-groups ", groups);
  return 1;
}

// Tensor-parallel ranks that hold one key/value group together.
int ranks_per_group(int64_t groups, int ranks) {
  return std::max(1, ranks / static_cast<int>(groups));
}

}  // namespace

SelfAttention::SelfAttention(const TransformerConfig& config, int64_t layer_number,
                             bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      layer_number_(layer_number),
      heads_(per_rank("--num-attention-heads", config.num_attention_heads, groups.tp.size())),
      groups_(groups_per_rank(config.query_groups(), groups.tp.size())),
      kv_(groups.block({Axis::kTensor}, ranks_per_group(config.query_groups(), groups.tp.size()),
                       "kv")),
      core_(config, layer_number, heads_, groups),
      linear_qkv_("linear_qkv", config.hidden_size, qkv_rows(config),
                  qkv_options(config, layer_number, sequence_parallel), groups),
      linear_proj_("linear_proj", config.attention_width(), config.hidden_size,
                   linear_proj_options(config, layer_number, sequence_parallel), groups) {
  add("linear_qkv", &linear_qkv_);
  if (config.qk_layernorm) {
    MEGATRON_CHECK(!config.qk_layernorm_over_heads || kv_.size() == 1,
                   "--qk-layernorm-over-heads with fewer "
                   "--num-query-groups (",
                   config.query_groups(), ") than tensor-parallel ranks (", groups.tp.size(),
                   ") is not built");
    q_layernorm_ = std::make_unique<QKNorm>(config, config.num_attention_heads, groups.tp);
    k_layernorm_ = std::make_unique<QKNorm>(config, config.query_groups(), groups.tp);
    add("q_layernorm", q_layernorm_.get());
    add("k_layernorm", k_layernorm_.get());
  }
  add("core_attention", &core_);
  add("linear_proj", &linear_proj_);
}

std::unique_ptr<LayerState> SelfAttention::make_state() const {
  return std::make_unique<KVCache>();
}

SublayerOutput SelfAttention::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  // With fewer key/value groups than tensor-parallel ranks, the rows of one group are split over
  // several ranks, which gather them; each then attends with its share of the query heads.
  at::Tensor input;  // input of linear_qkv; its all-gather in the backward overlaps with attention
  const SublayerOutput projected = project(x, context.offload(), &input);
  const auto back = [&](const at::Tensor& y) {
    return project_back(linear_qkv_.prefetch_input_in_backward(y, input), projected.residual, add,
                        context.offload());
  };
  const at::Tensor& mixed = projected.output;
  const int64_t s = mixed.size(0), b = mixed.size(1);
  const bool gated = config_.attention_output_gate;
  if (!q_layernorm_ && !gated && kv_.size() == 1 && core_.context_ranks(context.pass).size() == 1 &&
      context.state == nullptr && context.pass.token_blocks == nullptr) {
    return back(attend_packed(mixed, context));
  }
  const RotaryTables& rotary = context.rotary.of(config_.is_rotary_local(layer_number_));
  if (!q_layernorm_ && !gated && kv_.size() == 1 && context.state != nullptr)
    return back(decode(mixed, rotary, context));
  const variable_list qkv =
      SplitQKV::apply(mixed, groups_, heads_ * kv_.size() / groups_, config_.kv_channels, gated);
  at::Tensor q = own_heads(qkv[0]);
  at::Tensor k = qkv[1];
  const at::Tensor& v = qkv[2];
  const OffloadScope leads_to_core_attention(context.offload(), [&](const at::Tensor& saved) {
    return config_.offloads("core_attn") && !is_alias(saved, rotary.cos) &&
           !is_alias(saved, rotary.sin);
  });
  if (q_layernorm_) {
    q = q_layernorm_->forward(q);
    k = k_layernorm_->forward(k);
  }
  if (rotary.cos.defined()) {
    q = apply_rotary(q, rotary.cos, rotary.sin, rotary.interleaved);
    k = apply_rotary(k, rotary.cos, rotary.sin, rotary.interleaved);
  }
  at::Tensor y =
      context.state == nullptr
          ? core_.forward(q, k, v, context)
          : attend_cached({q.reshape({s, groups_, heads_ / groups_, config_.kv_channels}),
                           k.squeeze(1), v.squeeze(1)},
                          context);
  check_shape("core_attention output", y, {s, b, heads_, config_.kv_channels});
  if (gated) y = OutputGate::apply(y, own_heads(qkv[3]));
  return back(y.reshape({s, b, heads_ * config_.kv_channels}));
}

at::Tensor SelfAttention::decode(const at::Tensor& mixed, const RotaryTables& rotary,
                                 const LayerContext& context) {
  const int64_t t = mixed.size(0), of_group = heads_ / groups_;
  const at::Tensor heads = mixed.view({t, groups_, of_group + 2, config_.kv_channels});
  const at::Tensor y =
      attend_cached({heads.narrow(2, 0, of_group),
                     heads.select(2, of_group),
                     heads.select(2, of_group + 1),
                     {rotary.cos, rotary.sin, rotary.interleaved},
                     mixed.is_cuda() && t == 1 ? weight_at_rest(linear_proj_) : at::Tensor()},
                    context);
  return y.view({t, 1, heads_ * config_.kv_channels});
}

at::Tensor SelfAttention::attend_cached(const AddedRows& added, const LayerContext& context) const {
  return static_cast<KVCache*>(context.state)
      ->attend(added, context.pass.decoding->batch.rows, core_.cached(context, added.q.options()));
}

at::Tensor SelfAttention::own_heads(const at::Tensor& heads) const {
  return kv_.size() == 1 ? heads : heads.narrow(2, kv_.rank() * heads_, heads_).contiguous();
}

at::Tensor SelfAttention::attend_packed(const at::Tensor& mixed,
                                        const LayerContext& context) const {
  const RotaryTables& rotary = context.rotary.of(config_.is_rotary_local(layer_number_));
  const OffloadScope scope(context.offload(), [&](const at::Tensor& saved) {
    if (is_alias(saved, rotary.cos) || is_alias(saved, rotary.sin)) return false;
    return config_.offloads(is_alias(saved, mixed) ? "core_attn" : "attn_proj");
  });
  AttentionOptions core = core_.options(context, mixed.options(), mixed.size(0), mixed.size(0));
  const RotaryAngles angles{rotary.cos, rotary.sin, rotary.interleaved};
  if (const auto& rows = core_.unpadded_rows(context.pass))
    return unpadded_packed_attention(mixed, packed_heads(), angles, {rows}, core);
  if (context.pass.document_ids.defined()) {
    MEGATRON_ASSERT(!core.mask.defined(), "document ids beside a mask");
    if (context.pass.document_rows != nullptr)
      if (std::optional<at::Tensor> y = packed_attention_of_documents(
              mixed, packed_heads(), angles, {context.pass.document_rows}, core))
        return *y;
    const at::Tensor positions = zigzag_positions(mixed.size(0), 1, 0, mixed.device());
    core.mask = document_mask(context.pass.document_ids, positions, positions);
  }
  return packed_attention(mixed, packed_heads(), angles, core);
}

SublayerOutput SelfAttention::project_back(const at::Tensor& y, const at::Tensor& x, bool add,
                                           OffloadedPass* offload) {
  const OffloadScope scope(offload,
                           [&](const at::Tensor&) { return config_.offloads("attn_proj"); });
  if (add) return {linear_proj_.forward(y, x), {}};
  return {linear_proj_.forward(y), x};
}

SublayerOutput SelfAttention::project(const at::Tensor& x, OffloadedPass* offload,
                                      at::Tensor* input) {
  const OffloadScope scope(offload, [&](const at::Tensor& saved) {
    return config_.offloads(is_alias(saved, x) ? "attn_norm" : "qkv_linear");
  });
  SublayerOutput result =
      linear_qkv_.forward_with_residual(x, offload == nullptr ? input : nullptr);
  result.output = all_gather_last_dim_from_tensor_parallel_region(result.output, kv_);
  return result;
}

}  // namespace megatron
