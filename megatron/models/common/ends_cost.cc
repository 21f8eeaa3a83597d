#include "megatron/models/common/ends_cost.h"

#include <algorithm>

#include "megatron/models/common/multi_token_prediction.h"
#include "megatron/models/model.h"
#include "megatron/tensor_parallel/linear_cross_entropy.h"
#include "megatron/transformer/config/norm_placement.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {

namespace {

constexpr int64_t kIdBytes = 8;  // size of a token id or a target

// Tensors of output layer and loss, in bytes.
struct HeadTensors {
  HeadTensors(const TransformerConfig& config, const EndsShape& shape);

  int64_t input;    // of the output layer
  int64_t passing;  // its all-gathered rows, during the forward only
  int64_t back;     // gradient of the output layer's input, while it is computed
  int64_t logits;
  int64_t per_token;
  // > 0: the loss is computed in chunks of this many tokens; instead of logits, the gradient of the
  // input is held
  int64_t part = 0;
  int64_t working = 0;  // ... whose temporaries these are
};

HeadTensors::HeadTensors(const TransformerConfig& config, const EndsShape& shape) {
  const LayerShape& s = shape.layer;
  const StreamCost around(config, s);
  const int64_t T = s.tokens, columns = shape.vocabulary / s.tensor;
  input = around.normed;
  passing = around.gathered;
  back = around.product + (s.sequence_parallel ? around.part + around.gathered : around.cast);
  logits = T * shape.vocabulary / s.tensor / shape.vocabulary_stages * s.element;
  // Target, log-sum-exp, ignore flag, loss mask
  per_token = T * (kIdBytes + s.sum + 1 + 4);
  if (config.cross_entropy_fusion_impl != CrossEntropyFusion::kLinear) return;
  const int64_t given = config.cross_entropy_chunk_tokens;
  part = std::min(T, given > 0 ? given : cross_entropy_chunk(T, columns, s.element));
  logits = 0;
  input = around.product;
  back = s.residual == s.element ? 0 : T * config.hidden_size * s.residual;
  passing = s.sequence_parallel ? back : 0;
  per_token = T * (1 + s.sum);  // ignore flag, loss mask
  // The logits of one chunk and temporaries of the same size; targets, losses, per-token gradients
  working = part * (columns * s.element + 4 * s.sum) + T * (kIdBytes + 3 * s.sum);
}

Traffic head_traffic(const TransformerConfig& config, const LayerShape& s) {
  const double row = static_cast<double>(s.tokens * config.hidden_size);
  if (!s.sequence_parallel)
    return {0, 2 * scatter_bytes(s.tensor, row * static_cast<double>(s.element))};
  const double stream = scatter_bytes(s.tensor, row * static_cast<double>(s.residual));
  return {stream, stream};
}

EndCost embedding_cost(const TransformerConfig& config, const EndsShape& shape) {
  const LayerShape& s = shape.layer;
  const double one_way =
      scatter_bytes(s.tensor, static_cast<double>(s.tokens * config.hidden_size * s.element));
  EndCost cost;
  cost.saved = s.tokens * kIdBytes;
  cost.tensor = {(s.sequence_parallel ? 1 : 2) * one_way, s.sequence_parallel ? one_way : 0};
  return cost;
}

EndCost head_cost(const TransformerConfig& config, const EndsShape& shape) {
  const LayerShape& s = shape.layer;
  const StreamCost around(config, s);
  EndCost cost;
  if (has_final_norm(config)) cost.saved = around.stream + around.stats;
  if (shape.vocabulary_stages > 1) {
    // The final norm is the last operation of the pass; its output is sent, and its backward comes
    // first.
    cost.norm_forward_peak = cost.norm_backward_peak = around.stream;
    return cost;
  }
  const HeadTensors head(config, shape);
  cost.saved += head.input + head.logits + head.per_token;
  if (head.part == 0) cost.pending = head.input + head.logits;
  const bool normed_apart = s.residual != s.element || (head.part > 0 && s.sequence_parallel);
  cost.forward_peak = head.passing + (normed_apart ? around.stream : 0);
  // The whole input and its gradient
  if (head.part > 0) cost.forward_peak += head.input + head.working;
  if (config.logits_scaling != 1.0) cost.forward_peak += around.normed;  // before it is divided
  cost.norm_forward_peak = -(head.logits + head.per_token);
  // The gradient of the output layer's input is computed while the logits' gradient is held; after
  // that is freed, the final norm runs backward.
  cost.backward_peak = head.back - head.per_token;
  cost.norm_backward_peak =
      (head.part > 0 ? std::max(head.input, head.back) + (s.sequence_parallel ? around.stream : 0)
                     : std::max(around.normed, around.cast)) +
      around.stream - head.input - head.logits - head.per_token;
  cost.tensor = head_traffic(config, s);
  cost.tensor.forward += 2 * scatter_bytes(s.tensor, 3.0 * static_cast<double>(s.tokens * s.sum));
  return cost;
}

// One depth of multi-token prediction.
struct DepthCost {
  DepthCost(const TransformerConfig& config, const EndsShape& shape);

  LayerCost layer;
  int64_t before, after;  // saved before the layer; after it, with output layer and loss
  int64_t pending;
  int64_t forward_peak;   // besides `before` and `after`, while the layer runs
  int64_t backward_peak;  // the same, and besides the gradient of the depth's output
  double products;
  Traffic tensor;

  int64_t saved() const { return before + layer.saved().total() + after; }
};

DepthCost::DepthCost(const TransformerConfig& given, const EndsShape& shape) {
  const TransformerConfig config = depth_layer_config(given);
  const LayerShape& s = shape.layer;
  const StreamCost around(config, s);
  const HeadTensors tensors(config, shape);
  layer = layer_cost(config, config.num_layers, s, /*offloaded=*/false);
  const bool positions = config.position_embedding_type == PositionEmbedding::kLearnedAbsolute;
  before = kIdBytes * (s.tokens + (positions ? s.rows : 0)) + around.stream + 2 * around.stats +
           2 * around.normed;
  after = around.stream + around.stats + tensors.input + tensors.logits + tensors.per_token;
  pending = 2 * around.normed + around.product / s.tensor + layer.first.pending +
            layer.second.pending + tensors.input + tensors.logits;
  const int64_t layer_saved = layer.saved().total();
  forward_peak = layer.stream + layer.forward_peak() - layer_saved - after;
  backward_peak = std::max(tensors.back - tensors.per_token,
                           layer.stream + layer.backward_peak(/*grad_is_held=*/false).most - after);
  const auto h = static_cast<double>(config.hidden_size);
  products = layer.products() + 2 * h * h + h * static_cast<double>(shape.vocabulary);
  const double row = scatter_bytes(s.tensor, static_cast<double>(around.product));
  tensor = {row, s.sequence_parallel ? row : 0};
  tensor += s.sequence_parallel ? Traffic{2 * row, 4 * row} : Traffic{0, 4 * row};
  for (const Traffic& more :
       {layer.tensor(), embedding_cost(config, shape).tensor, head_cost(config, shape).tensor})
    tensor += more;
}

// Adds the depths, which run after the final norm and before the output layer, to the head. The
// first one reads the output layer's input; the gradient of that is held while they run backward.
void add_depths(const TransformerConfig& config, const EndsShape& shape, EndCost& head) {
  const DepthCost depth(config, shape);
  const StreamCost around(config, shape.layer);
  const HeadTensors main(config, shape);
  const int64_t depths = config.mtp_num_layers, loss = main.logits + main.per_token;
  const bool again = recomputes_depths(config);
  // Three columns of ids, the loss mask; the decoder's output and the depth's input
  // A fused output layer does not keep its input, which the next depth reads.
  const int64_t read = main.part > 0 ? around.normed : 0;
  const int64_t one = again ? (3 * kIdBytes + 4) * shape.layer.tokens : depth.saved() + read,
                more = depths * one + (again ? 2 * (depths - 1) * around.normed : 0),
                held = again ? depth.saved() : 0;
  head.saved += more;
  head.norm_forward_peak -= more;
  head.norm_backward_peak -= more;
  head.pending += depths * depth.pending;
  const int64_t unrecorded = std::max(depth.layer.unrecorded_peak(), main.logits);
  const int64_t forward = again ? unrecorded + around.stream : depth.forward_peak;
  head.forward_peak = std::max(head.forward_peak, forward - loss);
  head.backward_peak =
      std::max(head.backward_peak, held + around.normed + depth.backward_peak - loss);
  const auto count = static_cast<double>(depths);
  const auto add = [&](Traffic& sum, const Traffic& each) {
    sum += {count * each.forward, count * (each.backward + (again ? each.forward : 0))};
  };
  add(head.tensor, depth.tensor);
  add(head.context, depth.layer.context());
  add(head.expert, depth.layer.expert());
  add(head.expert_tensor, depth.layer.expert_tensor());
}

SplitHeadCost split_head_cost(const TransformerConfig& config, const EndsShape& shape) {
  const LayerShape& s = shape.layer;
  const HeadTensors head(config, shape);
  SplitHeadCost cost;
  cost.hidden = s.rows * config.hidden_size * s.residual;
  cost.statistics = 3 * s.tokens * s.sum;
  cost.held = head.input + head.logits + head.per_token +
              cost.statistics * (1 + s.tensor * shape.vocabulary_stages);
  cost.head_extra = cost.held + head.passing;
  cost.loss_extra = head.back;
  cost.tensor = head_traffic(config, s);
  return cost;
}

}  // namespace

EndsCost language_ends_cost(const ModelConfig& model, const EndsShape& shape) {
  const TransformerConfig& config = model.transformer;
  EndsCost cost;
  cost.embedding = embedding_cost(config, shape);
  cost.head = head_cost(config, shape);
  cost.head_products =
      static_cast<double>(config.hidden_size) * static_cast<double>(shape.vocabulary);
  if (shape.vocabulary_stages > 1) cost.split_head = split_head_cost(config, shape);
  if (config.mtp_num_layers > 0) {
    add_depths(config, shape, cost.head);
    cost.head_products +=
        static_cast<double>(config.mtp_num_layers) * DepthCost(config, shape).products;
  }
  cost.batch = shape.layer.tokens * (2 * kIdBytes + 4);
  return cost;
}

}  // namespace megatron
