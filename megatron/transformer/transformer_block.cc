#include "megatron/transformer/transformer_block.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/divided_rows.h"
#include "megatron/transformer/config/norm_placement.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/ssm/causal_conv.h"

namespace megatron {

TransformerBlock::TransformerBlock(const TransformerConfig& config, int64_t first_layer,
                                   int64_t num_layers, bool final_norm, bool sequence_parallel,
                                   const ParallelGroups& groups, LayerMaker make,
                                   int64_t numbered_after)
    : config_(config),
      rotary_(config),
      tp_(groups.tp),
      runner_(config, groups.tp, /*last_chunk=*/final_norm) {
  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {
    layers_.push_back(make(config, numbered_after + i + 1, sequence_parallel, groups));
    add(cat("layers.", i), layers_.back().get());
  }
  if (!final_norm || !has_final_norm(config)) return;
  final_layernorm_ =
      std::make_unique<Norm>(config.hidden_size, norm_options(config, sequence_parallel));
  add(config.is_hybrid() ? "final_norm" : "final_layernorm", final_layernorm_.get());
}

at::Tensor TransformerBlock::forward(at::Tensor x, const ForwardContext& pass) {
  const bool recurs = config_.has_letter('M') || config_.has_letter('G');
  if (recurs && pass.document_ids.defined() && !pass.document_runs.defined()) {
    ForwardContext with_runs = pass;
    with_runs.document_runs = document_runs(pass.document_ids);
    return forward(std::move(x), with_runs);
  }
  const LayerContext context{pass, rotary_tables(pass, x.scalar_type())};
  if (pass.decoding == nullptr || !pass.decoding->divides_rows) return run(std::move(x), context);
  const DividedRows rows(x.size(0), tp_);
  return rows.all(run(rows.own(x), context));
}

at::Tensor TransformerBlock::run(at::Tensor x, const LayerContext& context) {
  x = runner_.run(layers_, std::move(x), context);
  return final_layernorm_ ? final_layernorm_->forward(x) : x;
}

void TransformerBlock::keep_encoded(const at::Tensor& encoded, DecodingState& state,
                                    const SequenceSlot& slot) {
  for (const std::unique_ptr<Layer>& layer : layers_)
    layer->keep_encoded(encoded, *state.of(*layer), slot);
}

LayerRotary TransformerBlock::rotary_tables(const ForwardContext& pass, at::ScalarType type) const {
  if (config_.position_embedding_type != PositionEmbedding::kRope) return {};
  return rotary_.tables(pass.position_ids.defined() ? pass.position_ids : pass.place.position, type,
                        pass.decoding != nullptr ? pass.decoding->batch.rows.last : at::Tensor());
}

}  // namespace megatron
