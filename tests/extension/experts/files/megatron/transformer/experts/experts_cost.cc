#include "megatron/transformer/experts/experts_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/attention_cost.h"
#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {
namespace {

// Of the tokens of all expert ranks.
LayerShape of_all_tokens(LayerShape shape) {
  shape.tokens *= shape.expert;
  shape.rows *= shape.expert;
  return shape;
}

// The experts of one layer on one rank; tensors in bytes.
struct ExpertTensors {
  ExpertTensors(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape)
      : around(c, shape),
        expert(c, of_all_tokens(shape)),
        num_experts(kNumExperts / shape.expert),
        act(expert.product / c.hidden_size * c.ffn_hidden_size / shape.tensor),
        fc1(act * (is_gated(c.activation()) ? 2 : 1)),
        act_saved(c.recomputes("mlp_act") ? 0 : act),
        output(expert.normed),
        tokens(shape.expert > 1 ? expert.normed : 0),
        router(3 * shape.rows * kNumExperts * shape.sum),
        normed(around.pre_norm || around.cast > 0 ? around.normed : 0),
        stats(around.pre_norm ? around.stats : 0),
        gelu_in_product(is_gelu_in_product(c, layer_number)) {}

  const StreamCost around, expert;  // of this rank's rows, and of those of all expert ranks
  const int64_t num_experts;        // on this rank
  const int64_t act, fc1;           // of one expert: outputs of the activation and of linear_fc1
  const int64_t act_saved;          // input of linear_fc2
  const int64_t output;             // of one expert, and their sum
  const int64_t tokens;             // gathered over the expert ranks
  const int64_t router;             // probabilities, choices, weights
  const int64_t normed, stats;
  const bool gelu_in_product;

  int64_t saved() const { return router + tokens + num_experts * (fc1 + act_saved + output); }

  void forward(AllocationTrack& track) const {
    track.take(stats + around.cast + normed);
    track.give(around.cast);
    track.take(router + tokens);
    for (int64_t i = 0; i < num_experts; ++i) {
      track.take(expert.gathered + fc1);
      track.give(expert.gathered);
      track.take(act);
      track.take(expert.product + expert.part);
      track.give(act - act_saved + (expert.part > 0 ? expert.product : 0));
      track.take(output);  // the sum
      if (i > 0) track.give(output);
    }
    if (tokens > 0) {
      track.take(around.normed);
      track.give(output);
    }
    track.take(around.post_norm_saved);
    track.take(around.stream);
    track.give(around.normed);
  }

  int64_t unrecorded_peak() const {
    return normed + router + tokens + (num_experts > 1 ? output : 0) +
           std::max({fc1 + std::max(expert.gathered, act), act + expert.product + expert.part,
                     2 * output});
  }

  void backward(AllocationTrack& track) const {
    track.give(around.post_norm_saved);
    track.take(around.branch);
    if (tokens > 0) track.take(output);
    for (int64_t i = num_experts; i-- > 0;) {
      track.take(output);
      track.touch((i > 0 ? 2 : 1) * output);  // gradient of the weights
      track.give(output);
      track.take(expert.gathered + act);
      track.give(expert.gathered + output + act_saved);
      track.touch(act - act_saved);  // recomputed activation
      if (!gelu_in_product) {
        track.take(fc1);
        track.give(act);
      }
      track.give(fc1);
      track.take(expert.product + expert.part);
      track.touch(expert.gathered);
      track.give(fc1 + (expert.part > 0 ? expert.product : 0));
      if (i + 1 < num_experts) track.give(output);  // added to that of the other experts
    }
    track.give(around.branch + (tokens > 0 ? output : 0));
    if (tokens > 0) {
      track.take(around.normed);
      track.give(output + tokens);
    }
    track.touch(around.normed);  // of the router
    track.give(router);
    track.take(around.stream + around.cast);
    track.give(around.normed + around.cast + normed + stats);
    track.touch(around.stream);  // with the gradient of the residual path
    track.give(around.stream);
  }
};

SublayerCost half_cost(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape) {
  const ExpertTensors z(c, layer_number, shape);
  const StreamCost& around = z.around;
  const bool recompute = c.recomputes("mlp");
  SublayerCost cost;
  cost.saved.residual = around.stream;
  if (!recompute) {
    cost.saved.norms = z.normed + z.stats + around.post_norm_saved;
    cost.saved.mlp = z.saved();
  }
  cost.set_peaks([&](AllocationTrack& track) { z.forward(track); },
                 [&](AllocationTrack& track) { z.backward(track); }, z.unrecorded_peak(),
                 recompute);
  cost.pending = around.normed + z.tokens + z.num_experts * (z.fc1 + z.act + z.expert.product);
  if (shape.expert == 1) cost.postponed = z.act;
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size, gated = is_gated(c.activation()) ? 2 : 1;
  cost.linears.push_back({"router", kNumExperts, h});
  for (int64_t i = 0; i < kNumExperts; ++i) {
    cost.linears.push_back({"linear_fc1", gated * f, h});
    cost.linears.push_back({"linear_fc2", h, f, z.gelu_in_product});
  }
  // The norm and the sum with the residual; of an expert: the activation with its backward, the
  // weighted sum 3, its backward 4, the sum of the input's gradients 3
  const int64_t of_activation = gated == 2 ? 8 : z.gelu_in_product ? 2 : 5;
  cost.moved_elements = (kNormElements + 3) * static_cast<double>(h) +
                        static_cast<double>(kNumExperts * (of_activation * f + 10 * h));
  const Traffic mlp = around.tensor_traffic(shape);
  cost.tensor = {kNumExperts * mlp.forward, kNumExperts * mlp.backward};
  const double rows = scatter_bytes(shape.expert, static_cast<double>(z.output)),
               weights = rows * kNumExperts / static_cast<double>(h);
  cost.expert = {2 * rows + weights, 2 * rows + weights};
  if (recompute) {
    cost.recomputed_products = cost.weight_products();
    cost.tensor.backward += cost.tensor.forward;
    cost.expert.backward += cost.expert.forward;
  }
  return cost;
}

}  // namespace

LayerCost experts_cost(const TransformerConfig& config, int64_t layer_number,
                       const LayerShape& shape, bool offloaded) {
  LayerCost cost;
  cost.first = attention_cost(config, layer_number, shape, offloaded);
  cost.second = half_cost(config, layer_number, shape);
  cost.stream = cost.first.saved.residual;
  return cost;
}

}  // namespace megatron
