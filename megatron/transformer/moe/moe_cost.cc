#include "megatron/transformer/moe/moe_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/attention_cost.h"
#include "megatron/transformer/feed_forward/mlp_cost.h"
#include "megatron/transformer/moe/moe_layer.h"

namespace megatron {
namespace {

constexpr int64_t kIndex = 4;  // bytes of a choice

// The routed experts of one layer on one rank; tensors in bytes.
struct ExpertTensors {
  ExpertTensors(const TransformerConfig& c, const LayerShape& shape)
      : around(c, shape),
        exchanged(shape.expert * shape.expert_tensor > 1),
        width(c.moe_latent_size.value_or(c.hidden_size)),
        sent(shape.rows * c.moe_router_topk),
        rows(sent * shape.expert_tensor),
        ffn(c.expert_ffn_size(c) / shape.expert_tensor),
        input(rows * width * shape.element),
        act(rows * ffn * shape.element),
        fc1(act * (is_gated(c.activation()) ? 2 : 1)),
        act_saved(c.recomputes("moe_act") ? 0 : act),
        tokens(shape.rows * width * shape.element),
        own(exchanged ? sent * width * shape.element : 0),
        logits(shape.rows * c.num_experts * shape.sum),
        weights(sent * (kIndex + 2 * shape.sum)),
        has_losses(!moe_losses(c, 1).empty()) {}

  const StreamCost around;
  const bool exchanged;
  const int64_t width;       // h'
  const int64_t sent, rows;  // R k and r
  const int64_t ffn;         // f / y
  const int64_t input, act, fc1, act_saved;
  const int64_t tokens;  // R h' e
  const int64_t own;     // rows to send or received back
  const int64_t logits, weights;
  const bool has_losses;

  int64_t router_saved() const { return logits * (has_losses ? 2 : 1) + weights; }
  int64_t saved() const { return router_saved() + (exchanged ? input : 0) + fc1 + act_saved; }

  void forward(AllocationTrack& track) const {
    track.take(router_saved());
    track.touch(logits);
    track.take(own + input);
    track.give(own);
    track.take(fc1);
    track.take(act);
    track.take(input);  // the sums of linear_fc2
    track.give(act - act_saved);
    track.take(own + tokens);
    track.give(own + input + (exchanged ? 0 : input));
  }
  // Peak of the same without autograd.
  int64_t unrecorded() const {
    return weights + 2 * logits +
           std::max({own + input, input + fc1 + act, 2 * input + act, input + own + tokens});
  }
  // From the gradient of the experts' sum to that of the normed input, which stays allocated.
  void backward(AllocationTrack& track) const {
    track.take(own + input);
    track.give(own);
    if (!exchanged) track.take(input);
    track.take(act);
    track.touch(act);  // activation times weight again
    track.take(fc1);
    track.give(act + act_saved);
    track.take(input);
    track.give(fc1 + fc1 + input + input);
    track.take(own + tokens);
    track.give(own + input);
    track.touch(2 * logits + tokens);
    track.give(router_saved());
  }
};

class MoeHalf {
 public:
  MoeHalf(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape)
      : c_(c), shape_(shape), z_(c, shape), has_shared_(c.moe_shared_expert_intermediate_size) {
    if (has_shared_)
      shared_ = mlp_cost(shared_experts_config(c), layer_number, shape, /*offloaded=*/false);
  }

  SublayerCost cost() const {
    SublayerCost cost;
    const bool recompute = c_.recomputes("moe");
    cost.saved.residual = z_.around.stream;
    if (!recompute) {
      cost.saved.norms = z_.around.normed + z_.around.stats + z_.around.post_norm_saved;
      cost.saved.mlp = z_.saved() + shared_.saved.mlp;
    }
    cost.set_peaks(
        [&](AllocationTrack& track) { forward(track); },
        [&](AllocationTrack& track) { backward(track); },
        z_.around.normed + z_.tokens + std::max(z_.unrecorded(), shared_.unrecorded_peak),
        recompute);
    cost.pending = z_.around.normed + 2 * z_.input + z_.fc1 + z_.act + shared_.pending;
    add_products(cost);
    add_traffic(cost);
    if (recompute) {
      cost.recomputed_products = cost.weight_products();
      cost.tensor.backward += cost.tensor.forward;
      cost.expert.backward += cost.expert.forward;
    }
    return cost;
  }

 private:
  void forward(AllocationTrack& track) const {
    const StreamCost& around = z_.around;
    track.take(around.stats + around.cast + around.normed);
    track.give(around.cast);
    z_.forward(track);
    if (has_shared_) {
      track.touch(shared_.forward_peak);
      track.take(shared_.saved.mlp + around.normed);
      track.touch(around.normed);  // the sum
      track.give(around.normed);
    }
    track.take(around.post_norm_saved);
    track.take(around.stream);
    track.give(z_.tokens);
  }
  void backward(AllocationTrack& track) const {
    const StreamCost& around = z_.around;
    track.give(around.post_norm_saved);
    track.take(around.branch);
    if (has_shared_) {
      track.touch(shared_.backward_peak);
      track.take(around.normed);
      track.give(shared_.saved.mlp);
    }
    z_.backward(track);
    track.give(around.branch);
    track.take(around.stream + around.cast);
    track.give(z_.tokens + (has_shared_ ? around.normed : 0) + around.cast + around.normed +
               around.stats);
    track.touch(around.stream);
    track.give(around.stream);
  }

  // Of all ranks, per token: its k experts.
  void add_products(SublayerCost& cost) const {
    const int64_t h = c_.hidden_size, f = c_.expert_ffn_size(c_), k = c_.moe_router_topk,
                  gated = is_gated(c_.activation()) ? 2 : 1;
    cost.linears.push_back({"router", c_.num_experts, h});
    if (c_.moe_latent_size) {
      cost.linears.push_back({"fc1_latent_proj", z_.width, h});
      cost.linears.push_back({"fc2_latent_proj", h, z_.width});
    }
    cost.linears.push_back({"experts.linear_fc1", k * gated * f, z_.width, false,
                            gated == 2 && !c_.swiglu ? k * f : 0});
    cost.linears.push_back({"experts.linear_fc2", k * z_.width, f});
    for (const LinearSize& linear : shared_.linears) cost.linears.push_back(linear);
    // Norm and residual add; of a choice: rows gathered and summed in both passes, the activation
    // with its backward
    cost.moved_elements = kNormElements * static_cast<double>(h) +
                          static_cast<double>(k) * (8.0 * static_cast<double>(z_.width) +
                                                    (gated == 2 ? 8.0 : 5.0) * double(f)) +
                          shared_.moved_elements;
  }

  void add_traffic(SublayerCost& cost) const {
    const auto p = static_cast<double>(shape_.expert),
               y = static_cast<double>(shape_.expert_tensor),
               row = static_cast<double>(z_.width * shape_.element);
    const auto sent = static_cast<double>(z_.sent), tokens = static_cast<double>(shape_.rows),
               sum = static_cast<double>(shape_.sum);
    double one_way = 0;
    if (c_.moe_token_dispatcher_type == TokenDispatcherType::kAllgather)
      one_way =
          (p * y - 1) * tokens *
          (row + 6 * static_cast<double>(c_.moe_router_topk) + static_cast<double>(z_.width) * sum);
    else
      one_way = sent * (1 - 1 / p) * (2 * row + sum) + (y - 1) * sent * 2 * row;
    cost.expert = {one_way, one_way};
    cost.tensor = shared_.tensor;
  }

  const TransformerConfig& c_;
  const LayerShape& shape_;
  const ExpertTensors z_;
  const bool has_shared_;
  SublayerCost shared_;
};

}  // namespace

LayerCost moe_layer_cost(const TransformerConfig& config, int64_t layer_number,
                         const LayerShape& shape, bool offloaded) {
  LayerCost cost;
  cost.first = attention_cost(config, layer_number, shape, offloaded);
  cost.second = MoeHalf(config, layer_number, shape).cost();
  cost.stream = cost.first.saved.residual;
  cost.not_reloaded = cost.first.offloaded.given.total() - cost.first.offloaded.taken;
  return cost;
}

}  // namespace megatron
