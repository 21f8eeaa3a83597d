#include "megatron/transformer/moe/moe_cost.h"

#include <algorithm>
#include <cmath>

#include "megatron/comm/peer_rows.h"
#include "megatron/transformer/attention/attention_cost.h"
#include "megatron/transformer/feed_forward/mlp_cost.h"
#include "megatron/transformer/moe/capacity.h"
#include "megatron/transformer/moe/moe_layer.h"

namespace megatron {
namespace {

// Bytes of integers and sums that a choice keeps: its expert, its place among the rows and back,
// its weight and what the weight was made of; and a row that was exchanged, for its way.
constexpr int64_t kChoiceBytes = 26, kExchangedBytes = 37;

// What only --cpu-offloading-num-layers moves to the host.
constexpr const char* kOtherModules = "moe_router";

// The routed experts of one layer on one rank; tensors in bytes.
class ExpertTensors {
 public:
  ExpertTensors(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape)
      : around(c, shape),
        counts(rank_expert_rows(c, shape)),
        width(c.moe_latent_size.value_or(c.hidden_size)),
        input_(counts.held * width * shape.element),
        act_(counts.held * (c.expert_ffn_size(c) / shape.expert_tensor) * shape.element),
        fc1_(act_ * (is_gated(c.activation()) ? 2 : 1)),
        tokens_(shape.rows * width * shape.element),
        exchanged_(shape.expert * shape.expert_tensor > 1),
        gathers_(exchanged_ && c.moe_token_dispatcher_type == TokenDispatcherType::kAllgather),
        ep_(shape.expert),
        etp_(shape.expert_tensor),
        sums_(tokens_ / shape.element * shape.sum),
        received_(input_ / etp_),
        own_(counts.sent * width * shape.element),
        act_saved_(c.recomputes("moe_act")                     ? 0
                   : saves_codes(c.quantization(layer_number)) ? act_ / shape.element
                                                               : act_),
        act_again_(c.recomputes("moe_act") ? act_ : 0),
        latents_(c.moe_latent_size ? tokens_ : 0),
        logits_(shape.rows * c.num_experts * shape.sum),
        weights_(counts.sent * kChoiceBytes + (exchanged_ ? counts.held * kExchangedBytes : 0)),
        wide_(shape.sum / shape.element),
        has_losses_(!moe_losses(c, 1).empty()),
        early_(exchanged_ && c.moe_shared_expert_overlap) {}

  const StreamCost around;
  const RankExpertRows counts;
  const int64_t width;  // h'

  int64_t router_saved() const { return logits_ * (has_losses_ ? 2 : 1) + weights_; }
  int64_t saved() const { return router_saved() + latents_saved() + rows_saved(); }

  // From the normed input to output(), which stays allocated, in three steps. Between the last two
  // the shared expert is computed.
  void route(AllocationTrack& track) const {
    track.take(router_saved());
    track.touch(logits_);
  }
  void begin(AllocationTrack& track) const {
    track.take(latents_);
    if (early_) track.take(on_their_way());
  }
  void end(AllocationTrack& track) const {
    const int64_t gathered = gathers_ ? ep_ * etp_ * tokens_ : 0;
    track.take(gathered);
    run_round(track, early_);
    track.give(act_ - act_saved_);
    int64_t outputs = input_;
    if (counts.rounds > 1) {
      combine_begins(track, input_);
      if (gathers_) track.give(input_);
      outputs = later(input_);
      track.take(later(input_ + fc1_ + act_) + outputs);
      track.give(later(input_ + fc1_ + act_));
    }
    combine(track, outputs, 0);
    if (counts.rounds > 1) track.give(returned());
    if (!exchanged_) track.give(input_);
    track.give(gathered);
    if (latents_ == 0) return;
    track.take(around.normed);
    track.give(2 * latents_ - latents_saved());
  }
  // Peak of the same without autograd, with `beside` bytes held in the last step.
  int64_t unrecorded(int64_t beside) const {
    AllocationTrack track;
    track.take(weights_ - router_saved());
    route(track);
    begin(track);
    track.take(beside);
    end(track);
    return track.most();
  }
  // From the gradient of output() to that of the normed input, which stays allocated, in two steps.
  // Between them the gradient goes through the shared expert.
  void begin_backward(AllocationTrack& track) const {
    track.take(latents_);
    if (early_) track.take(on_their_way());
  }
  void end_backward(AllocationTrack& track) const {
    const int64_t gathered = gathers_ ? ep_ * etp_ * tokens_ : 0;
    track.take(gathered);
    to_experts(track, early_);
    const int64_t inputs = exchanged_ ? input_ : 2 * input_;
    if (!exchanged_) to_experts(track, false);
    track.take(act_);
    activation_backward(track);
    track.give(act_);
    track.take(input_);
    const int64_t held = inputs + fc1_ + act_again_;
    if (counts.rounds > 1) {
      combine_begins(track, input_);
      track.give(held + (gathers_ ? input_ : 0));
      // What the first round saved is still there.
      track.take(later(2 * (input_ + fc1_ + act_)));
      track.give(later(act_));
      track.take(later(input_));
      combine(track, later(input_), later(2 * (input_ + fc1_) + act_));
      track.give(returned());
    } else {
      combine(track, input_, held);
    }
    track.give(rows_saved() + gathered + latents_);
    track.touch(2 * logits_ + around.normed);
    if (latents_ > 0) {
      track.take(around.normed);
      track.give(tokens_ + latents_saved());
    }
    track.give(router_saved());
  }

  // Of FC1: Note [Weight gradients of experts] in routed_experts.cc.
  int64_t carried() const { return exchanged_ ? input_ + fc1_ : 0; }
  void offload_rows(const TransformerConfig& c, int64_t element, OffloadedBytes& out) const {
    if (exchanged_ || latents_ > 0)
      offload(c, "expert_fc1", &SavedBytes::mlp, exchanged_ ? input_ : latents_, element, 1, out);
    offload(c, "moe_act", &SavedBytes::mlp, fc1_, element, 1, out);
    offload(c, kOtherModules, &SavedBytes::mlp, act_saved_, element, 1, out);
    offload(c, kOtherModules, &SavedBytes::mlp, logits_, element * wide_, 1, out);
  }

  int64_t output() const { return latents_ > 0 ? around.normed : tokens_; }
  // Inputs and gradients of outputs of the products of experts, for a weight pass of its own.
  int64_t pending() const {
    return 2 * input_ + fc1_ + act_ + (latents_ > 0 ? 2 * latents_ + around.normed : 0);
  }

 private:
  // The activation is kept as FP8 codes of one byte.
  static bool saves_codes(const QuantizationOptions& options) {
    return options.enabled() && options.weight_gradient;
  }
  // What takes these bytes in one round, in the round after it.
  int64_t later(int64_t bytes) const {
    return bytes / counts.held * std::min(counts.held, counts.all - counts.held);
  }
  int64_t rows_saved() const { return (exchanged_ ? input_ : 0) + fc1_ + act_saved_; }
  // Input of the experts unless its rows are kept, and that of fc2_latent_proj.
  int64_t latents_saved() const { return latents_ * (exchanged_ && counts.rounds == 1 ? 1 : 2); }

  void run_round(AllocationTrack& track, bool started) const {
    to_experts(track, started);
    track.take(fc1_);
    activation(track);
    track.take(input_);  // outputs of linear_fc2
  }

  // What comes back of a round's rows.
  int64_t returned() const { return gathers_ || !exchanged_ ? 0 : ep_ > 1 ? own_ : received_; }

  // Rows sent and received by an exchange between expert ranks that has started.
  int64_t on_their_way() const { return own_ + (ep_ > 1 ? received_ : 0); }

  // Rows of the experts; of `allgather` from those of all ranks. `started`: their exchange has.
  void to_experts(AllocationTrack& track, bool started) const {
    if (gathers_ || !exchanged_) return track.take(input_);
    if (!started) track.take(on_their_way());
    if (ep_ > 1) track.give(own_);
    if (etp_ > 1) {
      track.take(input_);
      track.give(received_);
    }
    track.take(input_);
    track.give(etp_ > 1 ? input_ : received_);
  }

  // Starts to return rows to their sources: they are freed, and what comes back stays allocated.
  void combine_begins(AllocationTrack& track, int64_t outputs) const {
    if (gathers_ || !exchanged_) return;
    track.take(input_);
    track.give(outputs);
    int64_t passing = input_;
    if (etp_ > 1) {
      track.take(input_ + received_ * wide_);
      if (wide_ > 1) track.take(received_);
      track.give(2 * input_ + (wide_ > 1 ? received_ * wide_ : 0));
      passing = received_;
    }
    if (ep_ == 1) return;
    track.take(own_);
    track.give(passing);
  }

  // Sums of the rows of each token, which stay allocated, from `outputs`. `held`: freed by then, if
  // rows are sent back, else after it.
  void combine(AllocationTrack& track, int64_t outputs, int64_t held) const {
    combine_begins(track, outputs);
    const bool sent_back = exchanged_ && !gathers_;
    if (sent_back) track.give(held);
    const int64_t sums = gathers_ ? ep_ * etp_ * sums_ : sums_;
    if (gathers_) {
      track.take(sums + sums_);
      track.give(sums);
    }
    track.take(tokens_);
    if (gathers_) track.give(sums_);
    track.give(sent_back ? returned() : outputs + held);
  }

  void activation(AllocationTrack& track) const { track.take(act_); }
  // From the gradient of its output to that of its input, which stays allocated, and the output
  // again unless it is kept.
  void activation_backward(AllocationTrack& track) const { track.take(fc1_ + act_again_); }

  const int64_t input_, act_, fc1_;  // of one round
  const int64_t tokens_;             // R h' e
  const bool exchanged_;
  const bool gathers_;  // --moe-token-dispatcher-type allgather
  const int64_t ep_, etp_;
  const int64_t sums_;      // tokens in the type of sums
  const int64_t received_;  // rows of one expert-tensor rank
  const int64_t own_;       // rows to send or received back
  const int64_t act_saved_, act_again_;
  const int64_t latents_;
  const int64_t logits_, weights_;
  const int64_t wide_;
  const bool has_losses_;
  const bool early_;  // exchanges start before the shared expert
};

class MoeHalf {
 public:
  MoeHalf(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape)
      : c_(c),
        shape_(shape),
        z_(c, layer_number, shape),
        has_shared_(c.moe_shared_expert_intermediate_size) {
    if (has_shared_)
      shared_ = mlp_cost(shared_experts_config(c), layer_number, shape, /*offloaded=*/true);
  }

  SublayerCost cost(bool offloaded) const {
    SublayerCost cost;
    const bool recompute = c_.recomputes("moe");
    cost.saved.residual = z_.around.stream;
    if (!recompute) {
      cost.saved.norms = kept_normed() + z_.around.stats + z_.around.post_norm_saved;
      cost.saved.mlp = z_.saved() + shared_saved();
    }
    if (offloaded) cost.offloaded = offloaded_bytes(recompute);
    cost.set_peaks([&](AllocationTrack& track) { forward(track); },
                   [&](AllocationTrack& track) { backward(track); },
                   z_.around.normed + std::max(z_.unrecorded(has_shared_ ? z_.around.normed : 0),
                                               shared_unrecorded()),
                   recompute);
    cost.pending = pending();
    cost.carried = z_.carried();
    add_products(cost);
    add_traffic(cost);
    add_recomputed(cost);
    return cost;
  }

 private:
  int64_t pending() const {
    const StreamCost& around = z_.around;
    int64_t bytes = around.normed + z_.pending();
    // The shared expert has the same input, and no norm.
    if (has_shared_) bytes += shared_.pending - (around.pending() - around.product);
    return bytes;
  }

  bool has_gate() const { return c_.moe_shared_expert_gate; }
  bool shared_again() const { return c_.recomputes("shared_experts"); }
  // The normed input, which waits for the backward.
  int64_t kept_normed() const { return z_.around.recompute_norm ? 0 : z_.around.normed; }
  // The shared expert's tensors, its output, and the gate's logits and values.
  int64_t shared_saved() const {
    if (!has_shared_) return 0;
    return (shared_again() ? 0 : shared_.saved.mlp) +
           (has_gate() ? z_.around.normed + shape_.rows * (shape_.sum + shape_.element) : 0);
  }
  int64_t shared_unrecorded() const {
    return has_shared_ ? std::max(shared_.unrecorded_peak, 2 * z_.around.normed) : 0;
  }
  // Whether the sum over a token's experts adds the residual stream.
  bool adds_stream() const {
    return !has_shared_ && !c_.moe_latent_size && !c_.has_post_norm() &&
           !c_.changes_branches(/*training=*/true) && z_.around.cast == 0;
  }

  OffloadedBytes offloaded_bytes(bool recompute) const {
    OffloadedBytes out;
    const StreamCost& around = z_.around;
    offload(c_, "mlp_norm", &SavedBytes::residual, around.stream, shape_.residual, 1, out);
    if (recompute) return out;
    offload(c_, "mlp_norm", &SavedBytes::norms, around.stats, shape_.sum,
            c_.normalization == Normalization::kLayerNorm ? 2 : 1, out);
    offload(c_, "expert_fc1", &SavedBytes::norms, kept_normed(), shape_.element, 1, out);
    z_.offload_rows(c_, shape_.element, out);
    if (!has_shared_ || shared_again()) return out;
    out.given.mlp += shared_.offloaded.given.mlp;
    out.taken += shared_.offloaded.given.mlp;
    return out;
  }

  void forward(AllocationTrack& track) const {
    const StreamCost& around = z_.around;
    track.take(around.stats + around.cast + around.normed);
    track.give(around.cast);
    z_.route(track);
    z_.begin(track);
    if (has_shared_) {
      track.touch(shared_.forward_peak);
      track.take(shared_saved() + around.normed);
    }
    z_.end(track);
    if (has_shared_) {
      if (c_.moe_latent_size) track.touch(around.normed);  // the sum
      track.give(around.normed);
    }
    track.give(around.normed - kept_normed());
    track.take(around.post_norm_saved);
    if (adds_stream()) return;
    track.take(around.stream);
    track.give(z_.output());
  }
  void backward(AllocationTrack& track) const {
    const StreamCost& around = z_.around;
    const int64_t again = around.normed - kept_normed();
    track.give(around.post_norm_saved);
    track.take(around.branch + again);
    z_.begin_backward(track);
    if (has_shared_) {
      if (has_gate()) track.take(around.normed);  // the gradient of the shared expert's output
      const int64_t computed = shared_again() ? shared_.saved.mlp : 0;
      track.take(computed);
      track.touch(shared_.backward_peak);
      track.take(around.normed);
      track.give(shared_saved() + computed + (has_gate() ? around.normed : 0));
    }
    z_.end_backward(track);
    track.give(around.branch);
    track.take(around.stream + around.cast);
    track.give(z_.output() + (has_shared_ ? around.normed : 0) + around.cast + around.normed +
               around.stats);
    track.touch(around.stream);
    track.give(around.stream);
  }

  // What --recompute-modules computes and sends again.
  void add_recomputed(SublayerCost& cost) const {
    if (c_.recomputes("moe")) {
      cost.recomputed_products = cost.weight_products();
      cost.tensor.backward += cost.tensor.forward;
      cost.expert.backward += cost.expert.forward;
      cost.expert_tensor.backward += cost.expert_tensor.forward;
    } else if (has_shared_ && shared_again()) {
      cost.recomputed_products = shared_.linears.front().products();
      cost.tensor.backward += shared_.tensor.forward / 2;  // of its two linears
    }
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

  // Rows are sent at balance; what the rank's experts give goes back to its sources.
  void add_traffic(SublayerCost& cost) const {
    const auto p = static_cast<double>(shape_.expert),
               y = static_cast<double>(shape_.expert_tensor),
               row = static_cast<double>(z_.width * shape_.element);
    const auto sent = static_cast<double>(z_.counts.sent), sum = static_cast<double>(shape_.sum),
               own = static_cast<double>(z_.counts.all) / y;  // of one expert-tensor rank
    cost.tensor = shared_.tensor;
    if (c_.moe_token_dispatcher_type == TokenDispatcherType::kAllgather) {
      const double k = static_cast<double>(c_.moe_router_topk),
                   token = row + 6 * k + static_cast<double>(z_.width) * sum;
      const double one_way = (p * y - 1) * static_cast<double>(shape_.rows) * token;
      (p > 1 ? cost.expert : cost.expert_tensor) = {one_way, one_way};
      return;
    }
    const double rows = (1 - 1 / p) * sent * row, results = (1 - 1 / p) * own * row,
                 weights = (1 - 1 / p) * sent * sum;
    cost.expert = {rows + weights + results, rows + results + (1 - 1 / p) * own * sum};
    cost.expert_tensor.forward = (y - 1) * own * (2 * row + sum);
    cost.expert_tensor.backward = cost.expert_tensor.forward;
    if (z_.counts.rounds == 1) return;
    // Rounds after the first are exchanged again.
    const double later =
        1 - static_cast<double>(z_.counts.held) / static_cast<double>(z_.counts.all);
    cost.expert.backward += later * (rows + weights);
    cost.expert_tensor.backward += later * (y - 1) * own * (row + sum);
  }

  const TransformerConfig& c_;
  const LayerShape& shape_;
  const ExpertTensors z_;
  const bool has_shared_;
  SublayerCost shared_;
};

// Rows of all experts that are filled up to a capacity, of one rank.
int64_t padded_rows(const TransformerConfig& c, const LayerShape& shape) {
  return c.num_experts * expert_capacity(shape.rows, c.moe_router_topk, c.num_experts,
                                         *c.moe_expert_capacity_factor);
}

int64_t times(int64_t rows, double factor) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(rows) * factor));
}

}  // namespace

double worst_expert_load(const TransformerConfig& c, int64_t expert_ranks) {
  const int64_t own = c.num_experts / expert_ranks;
  return static_cast<double>(expert_ranks * std::min(c.moe_router_topk, own)) /
         static_cast<double>(c.moe_router_topk);
}

RankExpertRows rank_expert_rows(const TransformerConfig& c, const LayerShape& shape) {
  const int64_t k = c.moe_router_topk, etp = shape.expert_tensor, choices = shape.rows * k;
  const bool exchanged = shape.expert * etp > 1;
  RankExpertRows rows;
  rows.sent = choices;
  if (exchanged && c.moe_expert_capacity_factor)
    rows.sent = std::min(choices, padded_rows(c, shape));
  if (c.moe_pad_expert_input_to_capacity) rows.sent = padded_rows(c, shape);
  const double load = std::clamp(shape.expert_load, 1.0, worst_expert_load(c, shape.expert));
  rows.all = rows.held =
      c.moe_pad_expert_input_to_capacity ? rows.sent * etp : times(rows.sent * etp, load);
  if (!exchanged || !c.moe_expert_rank_capacity_factor) return rows;
  const int64_t bound =
      std::max<int64_t>(1, times(choices * etp, *c.moe_expert_rank_capacity_factor));
  rows.held = std::min(rows.all, bound);
  rows.rounds = (rows.all + bound - 1) / bound;
  return rows;
}

int64_t flex_memory_bytes(const TransformerConfig& c, const LayerShape& shape) {
  const int64_t ranks = shape.expert * shape.expert_tensor;
  if (!c.has_moe() || ranks == 1 || c.moe_token_dispatcher_type != TokenDispatcherType::kFlex)
    return 0;
  const RankExpertRows rows = rank_expert_rows(c, shape);
  const int64_t most = std::max(rows.held, rows.sent * shape.expert_tensor),
                row = c.moe_latent_size.value_or(c.hidden_size) * shape.element;
  return PeerRows::memory_bytes(ranks, flex_slot_bytes(most, row));
}

SublayerCost experts_cost(const TransformerConfig& config, int64_t layer_number,
                          const LayerShape& shape, bool offloaded) {
  return MoeHalf(config, layer_number, shape).cost(offloaded);
}

LayerCost moe_layer_cost(const TransformerConfig& config, int64_t layer_number,
                         const LayerShape& shape, bool offloaded) {
  LayerCost cost;
  cost.first = attention_cost(config, layer_number, shape, offloaded);
  cost.second = experts_cost(config, layer_number, shape, offloaded);
  cost.stream = cost.first.saved.residual;
  cost.not_reloaded = cost.first.offloaded.given.total() - cost.first.offloaded.taken;
  return cost;
}

}  // namespace megatron
