#include "megatron/transformer/attention/multi_latent_attention.h"

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

LinearOptions latent_options(const TransformerConfig& config, std::string_view linear,
                             int64_t layer_number, int64_t rows, int64_t columns,
                             bool sequence_parallel) {
  LinearOptions options;
  options.lora = lora_options(config, linear);
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init = config.weight_init(rows, columns);
  options.sequence_parallel = sequence_parallel;
  return options;
}

std::unique_ptr<ColumnParallelLinear> query_projection(const TransformerConfig& config,
                                                       int64_t layer_number, bool sequence_parallel,
                                                       const ParallelGroups& groups) {
  const int64_t rows = config.num_attention_heads * config.query_head_size();
  return std::make_unique<ColumnParallelLinear>(
      "linear_q_proj", config.hidden_size, rows,
      latent_options(config, "linear_q_proj", layer_number, rows, config.hidden_size,
                     sequence_parallel),
      groups);
}

LinearOptions down_options(const TransformerConfig& config, std::string_view linear,
                           int64_t layer_number, int64_t rows, bool sequence_parallel) {
  LinearOptions options =
      latent_options(config, linear, layer_number, rows, config.hidden_size, sequence_parallel);
  options.divided = false;
  return options;
}

LinearOptions up_options(const TransformerConfig& config, std::string_view linear,
                         int64_t layer_number, int64_t rows, int64_t rank, bool sequence_parallel) {
  LinearOptions options =
      latent_options(config, linear, layer_number, rows, rank, sequence_parallel);
  options.input_norm = config.qk_layernorm;
  options.norm = norm_options(config);
  options.norm.eps = config.latent_norm_epsilon.value_or(config.layernorm_epsilon);
  options.recompute_norm = config.recomputes("layernorm");
  return options;
}

int64_t key_value_rows(const TransformerConfig& config) {
  return config.num_attention_heads * (config.qk_head_dim + config.v_head_dim);
}

}  // namespace

MultiLatentAttention::MultiLatentAttention(const TransformerConfig& config, int64_t layer_number,
                                           bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      layer_number_(layer_number),
      tp_(groups.tp),
      sequence_parallel_(sequence_parallel && groups.tp.size() > 1),
      sizes_{per_rank("--num-attention-heads", config.num_attention_heads, groups.tp.size()),
             config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim},
      core_(config, layer_number, sizes_.heads, groups),
      linear_kv_down_proj_(
          "linear_kv_down_proj", config.hidden_size,
          config.kv_lora_rank + config.qk_pos_emb_head_dim,
          down_options(config, "linear_kv_down_proj", layer_number,
                       config.kv_lora_rank + config.qk_pos_emb_head_dim, sequence_parallel),
          groups),
      linear_kv_up_proj_("linear_kv_up_proj", config.kv_lora_rank, key_value_rows(config),
                         up_options(config, "linear_kv_up_proj", layer_number,
                                    key_value_rows(config), config.kv_lora_rank, sequence_parallel),
                         groups),
      linear_proj_("linear_proj", config.attention_width(), config.hidden_size,
                   linear_proj_options(config, layer_number, sequence_parallel), groups) {
  if (norms_inputs(config)) {
    NormOptions norm = norm_options(config);
    norm.partial_over_tensor = sequence_parallel;
    input_norm_ = std::make_unique<Norm>(config.hidden_size, norm);
  }
  if (config.q_lora_rank) {
    const int64_t rank = *config.q_lora_rank,
                  rows = config.num_attention_heads * config.query_head_size();
    linear_q_down_proj_ = std::make_unique<ColumnParallelLinear>(
        "linear_q_down_proj", config.hidden_size, rank,
        down_options(config, "linear_q_down_proj", layer_number, rank, sequence_parallel), groups);
    linear_q_up_proj_ = std::make_unique<ColumnParallelLinear>(
        "linear_q_up_proj", rank, rows,
        up_options(config, "linear_q_up_proj", layer_number, rows, rank, sequence_parallel),
        groups);
    add("linear_q_down_proj", linear_q_down_proj_.get());
    add("linear_q_up_proj", linear_q_up_proj_.get());
  } else {
    linear_q_proj_ = query_projection(config, layer_number, sequence_parallel, groups);
    add("linear_q_proj", linear_q_proj_.get());
  }
  linear_kv_up_proj_.weight().read_unquantized = true;  // Note [Latents of a cache]
  add("linear_kv_down_proj", &linear_kv_down_proj_);
  add("linear_kv_up_proj", &linear_kv_up_proj_);
  add("linear_proj", &linear_proj_);
}

std::unique_ptr<LayerState> MultiLatentAttention::make_state() const {
  return std::make_unique<LatentCache>();
}

SublayerOutput MultiLatentAttention::forward(const at::Tensor& x, const LayerContext& context,
                                             bool add) {
  OffloadedPass* offload = context.offload();
  at::Tensor y = project_and_attend(x, context);
  y = y.reshape({y.size(0), y.size(1), sizes_.heads * sizes_.value});
  const OffloadScope scope(offload,
                           [&](const at::Tensor&) { return config_.offloads("attn_proj"); });
  if (add) return {linear_proj_.forward(y, x), {}};
  return {linear_proj_.forward(y), x};
}

at::Tensor MultiLatentAttention::project_and_attend(const at::Tensor& x,
                                                    const LayerContext& context) {
  const RotaryTables& rotary = context.rotary.of(config_.is_rotary_local(layer_number_));
  const OffloadScope scope(context.offload(), [&](const at::Tensor& saved) {
    if (is_alias(saved, rotary.cos) || is_alias(saved, rotary.sin)) return false;
    return config_.offloads(is_alias(saved, x) ? "attn_norm" : "qkv_linear");
  });
  at::Tensor normed = input_norm_ ? input_norm_->forward(x) : x;
  SavedTensorScope::Restore again;
  std::optional<SavedTensorScope> saves_no_norm;
  if (input_norm_ && config_.recomputes("layernorm")) {
    again = recomputed([this, x = x.detach()] { return input_norm_->forward(x); });
    saves_no_norm.emplace(/*recomputing=*/true, [&](const at::Tensor& saved) {
      return is_alias(saved, normed) ? again : SavedTensorScope::Restore();
    });
  }
  Latents latents = project_down(normed);
  if (!again) normed.reset();
  if (!linear_q_down_proj_) latents.q_again = again;
  return context.state == nullptr ? attend(latents, rotary, context)
                                  : attend_cached(latents, rotary, context);
}

MultiLatentAttention::Latents MultiLatentAttention::project_down(const at::Tensor& normed) {
  Latents latents;
  latents.q = linear_q_down_proj_ ? linear_q_down_proj_->forward(normed) : normed;
  const std::vector<at::Tensor> down = linear_kv_down_proj_.forward(normed).split_with_sizes(
      {config_.kv_lora_rank, sizes_.rotated}, -1);
  latents.c = down[0].contiguous();
  // Every head reads r: its gradient is the sum over the heads of all tensor ranks.
  const at::Tensor r = down[1].contiguous();
  latents.r = sequence_parallel_ ? gather_from_sequence_parallel_region(r, tp_)
                                 : copy_to_tensor_model_parallel_region(r, tp_);
  return latents;
}

at::Tensor MultiLatentAttention::queries(const at::Tensor& q) {
  return (linear_q_up_proj_ ? linear_q_up_proj_ : linear_q_proj_)->forward(q);
}

LatentHeads MultiLatentAttention::project_up(const Latents& latents, const RotaryTables& rotary) {
  const at::Tensor q = queries(latents.q);
  const at::Tensor kv = linear_kv_up_proj_.forward(latents.c);
  return latent_heads(q, kv, latents.r, sizes_, rotary);
}

SavedTensorScope::Keep MultiLatentAttention::keep_latents(const LatentHeads& heads,
                                                          const Latents& latents,
                                                          const RotaryTables& rotary) {
  // Computed for whichever is asked for first; each is given away once.
  struct Again {
    std::function<LatentHeads()> compute;
    LatentHeads heads;
  };
  auto again = std::make_shared<Again>();
  Latents inputs{latents.q_again ? at::Tensor() : latents.q.detach(), latents.c.detach(),
                 latents.r.detach(), latents.q_again};
  again->compute = [this, inputs, rotary] {
    const at::NoGradGuard no_grad;
    Latents now = inputs;
    if (now.q_again) now.q = now.q_again();
    return project_up(now, rotary);
  };
  return [again, heads](const at::Tensor& saved) -> SavedTensorScope::Restore {
    for (at::Tensor LatentHeads::* part : {&LatentHeads::q, &LatentHeads::k, &LatentHeads::v})
      if (is_alias(saved, heads.*part))
        return [again, part] {
          if (!(again->heads.*part).defined()) again->heads = again->compute();
          return std::exchange(again->heads.*part, at::Tensor());
        };
    return {};
  };
}

at::Tensor MultiLatentAttention::attend(const Latents& latents, const RotaryTables& rotary,
                                        const LayerContext& context) {
  const LatentHeads heads = project_up(latents, rotary);
  std::optional<SavedTensorScope> saves_latents;
  if (config_.recomputes("mla_up_proj"))
    saves_latents.emplace(/*recomputing=*/true, keep_latents(heads, latents, rotary));
  return core_.forward(heads.q, heads.k, heads.v, context);
}

// Note [Latents of a cache] A row of one token reads the latents themselves: W_uk goes into its
// queries, W_uv behind its sums of latents. A part of several tokens computes the keys and values
// of its sequence anew, which costs less than scores of wide latents would. In batch-invariant mode
// every row does so, by the products that training has.
at::Tensor MultiLatentAttention::attend_cached(const Latents& latents, const RotaryTables& rotary,
                                               const LayerContext& context) {
  const at::NoGradGuard no_grad;
  const int64_t n = sizes_.heads, plain = sizes_.plain, rank = config_.kv_lora_rank;
  const PagedRows& rows = context.pass.decoding->batch.rows;
  const at::Tensor flat = queries(latents.q);
  const at::Tensor heads = flat.view({flat.size(0), flat.size(1), n, sizes_.query()});
  const at::Tensor q = at::cat(
      {heads.narrow(3, 0, plain), rotate_pairs(heads.narrow(3, plain, sizes_.rotated), rotary)},
      -1);
  const at::Tensor c = sequence_parallel_ ? all_gather_first_dim(latents.c, tp_) : latents.c;
  PagedBuffer& cache = static_cast<LatentCache*>(context.state)->latents;
  cache.write(rows, at::cat({linear_kv_up_proj_.normed(c),
                             rotate_pairs(latents.r.unsqueeze(2), rotary).squeeze(2)},
                            -1));
  const AcquiredValue weight(&linear_kv_up_proj_.weight());
  const at::Tensor up =
      linear_kv_up_proj_.with_adapter(weight.value()).view({n, plain + sizes_.value, rank});
  const AttentionOptions options = core_.cached(context, q.options());
  const PagedView keys = cache.view(), values{keys.pool.narrow(3, 0, rank), keys.scale};
  const bool invariant = is_batch_invariant();
  const auto over_heads = [&](const RaggedPart& part, const at::Tensor& several) {
    MEGATRON_CHECK(part.ends.empty(),
                   "given rows that attend to later ones are not built for latent attention");
    // [positions, rank + rotated]
    const at::Tensor kept = cache.gather(rows, part, first_seen(part, options)).squeeze(1);
    const at::Tensor c = kept.narrow(1, 0, rank);
    const at::Tensor kv =
        invariant
            ? linear_forward(c.contiguous(), up.flatten(0, 1), {}).view({-1, 1, n, up.size(1)})
            : at::einsum("pk,nfk->pnf", {c, up}).unsqueeze(1);
    const at::Tensor rotated =
        kept.narrow(1, rank, sizes_.rotated).unsqueeze(1).unsqueeze(1).expand({-1, 1, n, -1});
    return core_attention(several, at::cat({kv.narrow(3, 0, plain), rotated}, -1),
                          kv.narrow(3, plain, sizes_.value), options);
  };
  return attend_parts(
      rows, q,
      [&](const at::Tensor& single) {
        if (invariant) {
          std::vector<at::Tensor> outs;
          for (int64_t i = 0; i < single.size(0); ++i)
            outs.push_back(over_heads(rows.parts()[static_cast<size_t>(i)],
                                      single.narrow(0, i, 1).unsqueeze(1))
                               .squeeze(1));
          return at::cat(outs);
        }
        const at::Tensor absorbed =
            at::einsum("snp,npk->snk", {single.narrow(2, 0, plain), up.narrow(1, 0, plain)});
        const at::Tensor sums =
            paged_attention(at::cat({absorbed, single.narrow(2, plain, sizes_.rotated)}, -1), keys,
                            values, rows, options);
        return at::einsum("snk,nvk->snv", {sums, up.narrow(1, plain, sizes_.value)}).contiguous();
      },
      over_heads);
}

}  // namespace megatron
