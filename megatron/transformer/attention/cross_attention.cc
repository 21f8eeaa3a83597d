#include "megatron/transformer/attention/cross_attention.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [s, b, n, 2 d] -> keys and values [s, b, n, d], views. One function, so that the backward writes
// each gradient once into one buffer.
struct SplitKeysAndValues : torch::autograd::Function<SplitKeysAndValues> {
  static variable_list forward(AutogradContext* /*context*/, const at::Tensor& kv) {
    const int64_t d = kv.size(3) / 2;
    return {kv.narrow(3, 0, d), kv.narrow(3, d, d)};
  }
  static variable_list backward(AutogradContext* /*context*/, variable_list grads) {
    return {at::cat({grads[0], grads[1]}, 3)};
  }
};

LinearOptions input_options(const TransformerConfig& config, std::string_view linear, int64_t rows,
                            int64_t layer_number, bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.lora = lora_options(config, linear);
  options.bias = config.qkv_bias();
  options.init = config.weight_init(rows, config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  return options;
}

}  // namespace

CrossAttention::CrossAttention(const TransformerConfig& config, int64_t layer_number,
                               bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      parallel_(groups),
      heads_(per_rank("--num-attention-heads", config.num_attention_heads, groups.tp.size())),
      first_head_(groups.tp.rank() * heads_),
      linear_q_("linear_q", config.hidden_size, config.attention_width(),
                input_options(config, "linear_q", config.attention_width(), layer_number,
                              sequence_parallel),
                groups),
      linear_kv_("linear_kv", config.hidden_size, 2 * config.attention_width(),
                 input_options(config, "linear_kv", 2 * config.attention_width(), layer_number,
                               sequence_parallel),
                 groups),
      linear_proj_("linear_proj", config.attention_width(), config.hidden_size,
                   linear_proj_options(config, layer_number, sequence_parallel), groups),
      dropout_key_(random_key(config.seed, "cross_attention_dropout", layer_number)) {
  if (config.has_pre_norm()) {
    NormOptions norm = norm_options(config);
    norm.partial_over_tensor = sequence_parallel;
    norm_ = std::make_unique<Norm>(config.hidden_size, norm);
  }
  add("linear_q", &linear_q_);
  add("linear_kv", &linear_kv_);
  add("linear_proj", &linear_proj_);
}

at::Tensor CrossAttention::queries(const at::Tensor& x, at::ScalarType type,
                                   OffloadedPass* offload) {
  const OffloadScope scope(offload, [&](const at::Tensor& saved) {
    return config_.offloads(is_alias(saved, x) ? "attn_norm" : "qkv_linear");
  });
  const at::Tensor normed = norm_ != nullptr ? norm_->forward(x) : x;
  return linear_q_.forward(normed.to(type));
}

SublayerOutput CrossAttention::project_back(const at::Tensor& y, const at::Tensor& x, bool add,
                                            OffloadedPass* offload) {
  const OffloadScope scope(offload,
                           [&](const at::Tensor&) { return config_.offloads("attn_proj"); });
  if (add) return {linear_proj_.forward(y, x), {}};
  return {linear_proj_.forward(y), x};
}

// The encoder's output, which every layer reads, stays on the device.
SublayerOutput CrossAttention::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  OffloadedPass* const offload = context.offload();
  if (context.state != nullptr) {
    auto& kept = static_cast<CrossKVCache&>(*context.state);
    const at::Tensor q = queries(x, kept.keys_and_values.data().scalar_type(), offload);
    return project_back(attend_kept(q, kept, context.pass.decoding->batch), x, add, offload);
  }
  MEGATRON_ASSERT(context.pass.encoded != nullptr, "cross attention without an encoder's output");
  const EncodedSequence& encoded = *context.pass.encoded;
  const at::Tensor q = queries(x, encoded.states.scalar_type(), offload),
                   kv = gather_sequence(linear_kv_.forward(encoded.states),
                                        context_ranks(context.pass));
  at::Tensor y;
  {
    const OffloadScope scope(offload, [&](const at::Tensor& saved) {
      if (saved.scalar_type() == at::kBool) return false;  // the mask, of which a layer has a view
      const bool input = is_alias(saved, q) || is_alias(saved, kv);
      return config_.offloads(input ? "core_attn" : "attn_proj");
    });
    y = attend_encoded(q, kv, encoded, context.pass);
  }
  return project_back(y, x, add, offload);
}

void CrossAttention::keep(const at::Tensor& encoded, LayerState& state, const SequenceSlot& slot) {
  auto& kept = static_cast<CrossKVCache&>(state);
  const int64_t n = encoded.size(0), width = 2 * config_.kv_channels;
  const at::Tensor keys_and_values =
      kept.keys_and_values.rows(slot.num_slots, {slot.most, heads_, width}, encoded.options());
  const at::Tensor lengths =
      kept.lengths.rows(slot.num_slots, {1}, encoded.options().dtype(at::kLong));
  if (n == 0) return;
  MEGATRON_ASSERT(n <= slot.most, n, " rows of an encoder's output, and room for ", slot.most);
  keys_and_values.select(0, slot.slot)
      .narrow(0, 0, n)
      .copy_(linear_kv_.forward(encoded).view({n, heads_, width}));
  lengths.select(0, slot.slot).fill_(n);
}

// q [t, 1, n d] of rows of several sequences -> [t, 1, n d]: each row is a sample of one query.
at::Tensor CrossAttention::attend_kept(const at::Tensor& q, CrossKVCache& kept,
                                       const RaggedBatch& batch) const {
  const int64_t t = q.size(0), d = config_.kv_channels;
  std::vector<int64_t> of_rows;
  for (size_t i = 0; i < batch.slots.size(); ++i)
    of_rows.insert(of_rows.end(), static_cast<size_t>(batch.rows.parts()[i].count), batch.slots[i]);
  const at::Tensor slots = at::tensor(of_rows, at::kLong).to(q.device());
  const at::Tensor kv = kept.keys_and_values.data().index_select(0, slots).transpose(0, 1);
  const int64_t most = kv.size(0);
  AttentionOptions options;
  options.causal = false;
  options.scale = config_.softmax_scale();
  options.backend = config_.attention_backend;
  options.mask = (at::arange(most, slots.options()) >= kept.lengths.data().index_select(0, slots))
                     .view({t, 1, 1, most});
  return core_attention(q.view({1, t, heads_, d}), kv.narrow(3, 0, d), kv.narrow(3, d, d), options)
      .view({t, 1, heads_ * d});
}

const ProcessGroup& CrossAttention::context_ranks(const ForwardContext& pass) const {
  return pass.cp != nullptr ? *pass.cp : parallel_.cp;
}

AttentionOptions CrossAttention::attention_options(const ForwardContext& pass,
                                                   const TokenPositions& place,
                                                   const at::Tensor& key_position) const {
  AttentionOptions options;
  options.causal = false;
  options.scale = config_.softmax_scale();
  options.backend = config_.attention_backend;
  options.deterministic = !config_.fast;
  options.recompute = config_.recomputes("core_attn");
  if (pass.training && config_.attention_dropout > 0.0) {
    options.dropout = config_.attention_dropout;
    options.key = dropout_key_;
    options.place = place;
    options.key_position = key_position;
    options.first_head = first_head_;
  }
  return options;
}

at::Tensor CrossAttention::attend(const at::Tensor& q, const at::Tensor& kv,
                                  const AttentionOptions& options) const {
  const int64_t d = config_.kv_channels;
  const variable_list parts =
      SplitKeysAndValues::apply(kv.view({kv.size(0), kv.size(1), heads_, 2 * d}));
  return core_attention(q.view({q.size(0), q.size(1), heads_, d}), parts[0], parts[1], options);
}

// q [s, b, n d], kv [s_e, b, 2 n d] -> [s, b, n d]
at::Tensor CrossAttention::attend_encoded(const at::Tensor& q, const at::Tensor& kv,
                                          const EncodedSequence& encoded,
                                          const ForwardContext& pass) const {
  const int64_t s = q.size(0), b = q.size(1), s_e = kv.size(0), d = config_.kv_channels;
  const std::shared_ptr<const UnpaddedRows>& rows = encoded.rows;
  MEGATRON_ASSERT((rows == nullptr) == (pass.unpadded == nullptr),
                  "one of encoder and decoder has padding");
  if (encoded.readers.position.defined()) {
    check_shape("what several sequences read", kv,
                {encoded.position.size(0), encoded.readers.sample.size(0), 2 * heads_ * d});
    MEGATRON_ASSERT(!encoded.mask.defined() && rows == nullptr, "a mask of what several read");
    const AttentionOptions options = attention_options(pass, encoded.readers, encoded.position);
    return attend(q.view({-1, kv.size(1), heads_ * d}), kv, options).reshape({s, b, heads_ * d});
  }
  check_shape("the encoder's output", kv,
              {rows != nullptr ? rows->rows : encoded.position.size(0), b, 2 * heads_ * d});
  AttentionOptions options = attention_options(pass, pass.place, encoded.position);
  if (encoded.mask.defined() && rows == nullptr) {
    check_shape("the encoder's mask", encoded.mask, {b, s_e});
    options.mask = encoded.mask.view({b, 1, 1, s_e}).expand({b, 1, s, s_e});
  }
  if (rows == nullptr) return attend(q, kv, options).reshape({s, b, heads_ * d});
  const variable_list parts = SplitKeysAndValues::apply(kv.view({s_e, b, heads_, 2 * d}));
  return unpadded_attention(q.view({s, b, heads_, d}), parts[0], parts[1], {pass.unpadded, rows},
                            options)
      .reshape({s, b, heads_ * d});
}

}  // namespace megatron
