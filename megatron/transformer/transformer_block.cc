#include "megatron/transformer/transformer_block.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {

TransformerBlock::TransformerBlock(const TransformerConfig& config, int64_t first_layer,
                                   int64_t num_layers, bool final_norm, bool sequence_parallel,
                                   const ParallelGroups& groups)
    : config_(config), tp_(groups.tp), rotary_(config) {
  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {
    layers_.push_back(std::make_unique<TransformerLayer>(config, i + 1, sequence_parallel, groups));
    add(cat("layers.", i), layers_.back().get());
  }
  if (!final_norm) return;
  final_layernorm_ = std::make_unique<Norm>(
      config.hidden_size, NormOptions{config.normalization, config.layernorm_epsilon,
                                      config.layernorm_zero_centered_gamma, sequence_parallel});
  add("final_layernorm", final_layernorm_.get());
}

at::Tensor TransformerBlock::run_layers(at::Tensor x, size_t first, size_t last, size_t offloaded,
                                        LayerContext context) {
  for (size_t i = first; i < last; ++i) {
    context.offloaded = i < offloaded;
    if (context.pass.decoding != nullptr) context.state = context.pass.decoding->of(*layers_[i]);
    x = layers_[i]->forward(x, context);
  }
  return x;
}

at::Tensor TransformerBlock::forward(at::Tensor x, const ForwardContext& pass) {
  LayerContext context{pass, {}};
  if (config_.position_embedding_type == PositionEmbedding::kRope)
    context.rotary = rotary_.tables(
        pass.position_ids.defined() ? pass.position_ids : pass.place.position, x.scalar_type());
  const auto offloaded = static_cast<size_t>(config_.num_offloaded_layers(
      static_cast<int64_t>(layers_.size()), final_layernorm_ != nullptr));
  const bool full =
      config_.recompute_granularity == RecomputeGranularity::kFull && pass.tape != nullptr;
  const auto unit = static_cast<size_t>(
      config_.recompute_method == RecomputeMethod::kUniform ? config_.recompute_num_layers : 1);
  const size_t recomputed =
      !full ? 0
      : config_.recompute_method == RecomputeMethod::kUniform
          ? layers_.size()
          : std::min(layers_.size(), static_cast<size_t>(config_.recompute_num_layers));
  size_t done = 0;
  for (; done < recomputed; done = std::min(done + unit, recomputed)) {
    // The tape runs the body after this function has returned, so the body owns what it needs. What
    // the recomputation saves is used at once and therefore not offloaded.
    const size_t first = done, last = std::min(done + unit, recomputed);
    ForwardContext again = pass;
    again.offload = nullptr;
    x = pass.tape->run(
        [this, first, last, again, rotary = context.rotary](const at::Tensor& in) {
          return run_layers(in, first, last, 0, LayerContext{again, rotary});
        },
        x, input_keeper(pass, last <= offloaded));
  }
  x = run_layers(std::move(x), done, layers_.size(), offloaded, context);
  return final_layernorm_ ? final_layernorm_->forward(x) : x;
}

// How the input of a recomputed unit is kept until the backward.
RecomputeTape::Keeper TransformerBlock::input_keeper(const ForwardContext& pass,
                                                     bool offloaded) const {
  if (config_.distribute_saved_activations)
    return [this](const at::Tensor& in) { return distribute_saved_activation(in, tp_); };
  if (pass.offload == nullptr) return {};
  return [&pass, offloaded](const at::Tensor& in) -> std::function<at::Tensor()> {
    pass.offload->begin_group();
    return offloaded ? pass.offload->keep(in) : [in] { return in; };
  };
}

}  // namespace megatron
