// Multi-token prediction: layers after the decoder, each of which predicts one more token ahead.
//
// Depth k = 1..D (--mtp-num-layers), with H_0 the decoder's output after its final norm and ids,
// labels and loss mask shifted left by k:
//
//   u   = [enorm(embedding(ids)) | hnorm(H_{k-1})]
//   H_k = final_layernorm(transformer_layer(eh_proj u))
//
// and the loss of H_k by the model's own output layer. Token i of sequence q adds to the step's sum
//
//   factor / D * w_q / w_{k,q} * mask_k,i * cross entropy
//
// with w the weights of the sequence in the main loss and under the shifted mask; with
// --no-calculate-per-token-loss factor / D times the mean over the micro-batch.
//
// Source: DeepSeek-AI 2024 (arXiv:2412.19437) section 2.2; Megatron-LM's multi_token_prediction.py.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/models/common/shifted_batch.h"
#include "megatron/models/model.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

// The configuration of a depth's layer, whatever its number: that of the decoder's last layer,
// without cuts of the tape and on the device. Of a repeated layer, each depth adds its part of the
// routers' losses.
TransformerConfig depth_layer_config(const TransformerConfig& config);

// Whether a depth is recomputed in the backward, with its loss.
bool recomputes_depths(const TransformerConfig& config);

// One depth. Parameters: enorm.*, hnorm.*, eh_proj.weight [h, 2h] (rows divided over tensor ranks),
// transformer_layer..., final_layernorm.*.
class MultiTokenLayer : public Module {
 public:
  // `depth` counts from 1. The layer's number, which its draws depend on, follows those of the
  // decoder.
  MultiTokenLayer(const ModelConfig& config, int64_t depth, const ParallelGroups& groups);

  //   embedded, hidden, return   as for Layer::forward
  //
  // Communication: over tp, as ColumnParallelLinear and to gather its output; of the layer.
  at::Tensor forward(at::Tensor embedded, const at::Tensor& hidden, const LayerContext& context);

 private:
  const TransformerConfig config_;
  const ProcessGroup& tp_;
  bool sequence_parallel_;
  Norm enorm_, hnorm_;
  ColumnParallelLinear eh_proj_;
  std::unique_ptr<Layer> transformer_layer_;
  Norm final_layernorm_;
};

// What the depths share with the model.
struct MultiTokenEnds {
  // Embeddings of the tokens as input of a layer; `depth` counts from 1.
  std::function<at::Tensor(const at::Tensor& tokens, const ForwardContext& context, int64_t depth)>
      embed;
  // Cross entropy per token, [s, b] fp32 (fp64). `weights` [s, b]: what the losses are multiplied
  // by in their sum. `hits` becomes [s, b] bool: whether no logit is larger than that of the label.
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& labels,
                           const at::Tensor& weights, const ForwardContext& context,
                           at::Tensor* hits)>
      token_losses;
};

// All depths of a model. Parameters: layers.N... with N from 0.
class MultiTokenPrediction : public Module {
 public:
  MultiTokenPrediction(const ModelConfig& config, const ParallelGroups& groups,
                       MultiTokenEnds ends);
  // Adds the losses to context.auxiliary_losses, which must not be null. With full recomputation,
  // uniform, each depth is recomputed together with its loss.
  //
  //   hidden   [s, b, h]   ([s/t, b, h]) output of the decoder; `context` with its rows
  //   return   hidden, which the main loss must be computed from
  at::Tensor forward(const at::Tensor& hidden, const Batch& batch, const ForwardContext& context);

  // Names in logs: of each depth its loss, and the percentage of labels that have the largest
  // logit.
  static std::vector<std::string> loss_names(const TransformerConfig& config);

 private:
  at::Tensor run_depth(int64_t depth, const at::Tensor& hidden, const ShiftedColumns& columns,
                       const ForwardContext& pass, const LayerRotary& rotary);
  void add_loss(int64_t depth, const at::Tensor& hidden, const ShiftedColumns& columns,
                const ForwardContext& pass);
  MultiTokenLayer& layer(int64_t depth) {
    return *layers_[layers_.size() == 1 ? 0 : static_cast<size_t>(depth - 1)];
  }

  const TransformerConfig& config_;
  const ProcessGroup& cp_;
  RotaryEmbedding rotary_;
  MultiTokenEnds ends_;
  std::vector<std::unique_ptr<MultiTokenLayer>> layers_;
};

}  // namespace megatron
