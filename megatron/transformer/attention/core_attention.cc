#include "megatron/transformer/attention/core_attention.h"

#include "megatron/base/check.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/attention/token_blocks.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

namespace {

void check_whole_sequences(const char* what, const ProcessGroup& cp) {
  MEGATRON_CHECK(cp.size() == 1, what, " over ", cp.size(),
                 " context-parallel ranks is not built\nhint: --context-parallel-size 1");
}

}  // namespace

CoreAttention::CoreAttention(const TransformerConfig& config, int64_t layer_number, int64_t heads,
                             const ParallelGroups& groups)
    : config_(config),
      parallel_(groups),
      layer_number_(layer_number),
      first_head_(groups.tp.rank() * heads),
      context_parallel_type_(config.context_parallel_type(layer_number)),
      dropout_key_(random_key(config.seed, "attention_dropout", config.draw_number(layer_number))),
      heads_(heads) {
  if (config.softmax_type != SoftmaxType::kLearnable) return;
  softmax_offset_ = std::make_unique<Parameter>();
  softmax_offset_->global_shape = {config.num_attention_heads};
  softmax_offset_->local_shape = {heads};
  softmax_offset_->placement.shards = {{0, Axis::kTensor, {}}};
  softmax_offset_->init = Init::normal(config.init_method_std);
  softmax_offset_->role = ParameterRole::kBias;
  add("softmax_offset", softmax_offset_.get());
}

at::Tensor CoreAttention::sinks(const at::TensorOptions& queries) const {
  const at::ScalarType type = queries.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  if (softmax_offset_) return differentiable(*softmax_offset_, type);
  if (config_.softmax_type == SoftmaxType::kVanilla) return {};
  return at::zeros({heads_}, queries.dtype(type));
}

AttentionOptions CoreAttention::options(const LayerContext& context,
                                        const at::TensorOptions& queries, int64_t num_queries,
                                        int64_t num_keys) const {
  AttentionOptions options;
  options.causal = config_.causal && !context.pass.mask_is_causal;
  options.scale = config_.softmax_scale();
  options.softcap = config_.attn_logit_softcapping;
  if (const std::vector<int64_t> window = config_.window(layer_number_); !window.empty()) {
    options.window_left = window[0];
    if (!config_.causal) options.window_right = window[1];
  }
  options.mask = context.pass.attention_mask;
  options.sinks = sinks(queries);
  options.distance_bias = context.pass.distance_bias;
  options.backend = config_.attention_backend;
  options.deterministic = !config_.fast;
  options.recompute = config_.recomputes("core_attn");
  if (context.pass.training && config_.attention_dropout > 0.0) {
    MEGATRON_ASSERT(num_queries == num_keys, "dropout while decoding");
    options.dropout = config_.attention_dropout;
    options.key = dropout_key_;
    options.place = context.pass.place;
    options.key_position = context.pass.place.position;
    options.first_head = first_head_;
  }
  return options;
}

AttentionOptions CoreAttention::cached(const LayerContext& context,
                                       const at::TensorOptions& queries) const {
  check_whole_sequences("decoding", context_ranks(context.pass));
  MEGATRON_ASSERT(!context.pass.attention_mask.defined() && !context.pass.document_ids.defined(),
                  "a mask or document ids beside a cache");
  return options(context, queries, 1, 1);
}

const std::shared_ptr<const UnpaddedRows>& CoreAttention::unpadded_rows(
    const ForwardContext& pass) const {
  if (!config_.attends_within_parts(layer_number_)) return pass.unpadded;
  MEGATRON_ASSERT(pass.unpadded_parts != nullptr, "layer ", layer_number_,
                  " attends within parts of samples, which the pass does not have");
  return pass.unpadded_parts;
}

at::Tensor CoreAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const LayerContext& context) const {
  const ForwardContext& pass = context.pass;
  // Besides its inputs, core attention saves its output, which linear_proj saves too. With an
  // all-to-all of tokens and heads it saves exchanged copies of them instead.
  const ProcessGroup& cp = context_ranks(pass);
  const bool exchanged = cp.size() > 1 && (context_parallel_type_ == ContextParallelType::kA2A ||
                                           context_parallel_type_ == ContextParallelType::kA2AP2P);
  const OffloadScope scope(context.offload(), [&](const at::Tensor& saved) {
    const bool input = exchanged || is_alias(saved, q) || is_alias(saved, k) || is_alias(saved, v);
    return config_.offloads(input ? "core_attn" : "attn_proj");
  });
  AttentionOptions core = options(context, q.options(), q.size(0), k.size(0));
  if (pass.token_blocks != nullptr) {
    MEGATRON_ASSERT(cp.size() == 1 && !pass.attention_mask.defined(), "blocks beside a mask");
    if (why_not_blocks(q, k, v, *pass.token_blocks, pass.document_rows.get(), core).empty())
      return attention_with_blocks(q, k, v, pass.token_blocks, pass.document_rows, core);
    core.mask = pass.mask_of_blocks();
    core.causal = false;
    return core_attention(q, k, v, core);
  }
  if (const auto& rows = unpadded_rows(pass)) {
    check_whole_sequences("attention without padding", cp);
    MEGATRON_ASSERT(!pass.attention_mask.defined() && !pass.document_ids.defined(),
                    "a mask or document ids beside rows without padding");
    return unpadded_attention(q, k, v, {rows}, core);
  }
  MEGATRON_ASSERT(!pass.attention_mask.defined() || !pass.document_ids.defined(),
                  "document ids beside a mask");
  if (pass.attention_mask.defined() && cp.size() == 1) return core_attention(q, k, v, core);
  if (pass.document_rows != nullptr && cp.size() == 1)
    if (std::optional<at::Tensor> y = attention_of_documents(q, k, v, {pass.document_rows}, core))
      return *y;
  return context_parallel_attention(q, k, v, core, pass.document_ids, context_parallel_type_,
                                    parallel_, &cp);
}

}  // namespace megatron
