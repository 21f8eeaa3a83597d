#include "megatron/transformer/layer/layer_cost.h"

#include <algorithm>

#include "megatron/transformer/config/norm_placement.h"

namespace megatron {

SavedBytes& SavedBytes::operator+=(const SavedBytes& other) {
  residual += other.residual;
  norms += other.norms;
  attention += other.attention;
  mlp += other.mlp;
  ends += other.ends;
  encoder += other.encoder;
  features += other.features;
  return *this;
}

SavedBytes& SavedBytes::operator-=(const SavedBytes& other) {
  residual -= other.residual;
  norms -= other.norms;
  attention -= other.attention;
  mlp -= other.mlp;
  ends -= other.ends;
  encoder -= other.encoder;
  features -= other.features;
  return *this;
}

Traffic& Traffic::operator+=(const Traffic& other) {
  forward += other.forward;
  backward += other.backward;
  return *this;
}

KeptBytes& KeptBytes::operator+=(const KeptBytes& other) {
  position += other.position;
  sequence += other.sequence;
  return *this;
}

double scatter_bytes(int64_t ranks, double bytes) {
  return static_cast<double>(ranks - 1) / static_cast<double>(ranks) * bytes;
}

double SublayerCost::weight_products() const {
  double products = 0;
  for (const LinearSize& linear : linears) products += linear.products();
  return products;
}

void SublayerCost::append(const SublayerCost& next, int64_t stream) {
  saved += next.saved;
  offloaded.given += next.offloaded.given;
  offloaded.taken += next.offloaded.taken;
  unrecorded_peak = std::max(unrecorded_peak, stream + next.unrecorded_peak);
  forward_peak = std::max(forward_peak, forward_end + next.forward_peak);
  forward_end += next.forward_end;
  // Backward `next` runs first; what lies between is freed after it.
  const int64_t between = next.backward_end - stream;
  backward_peak = std::max(next.backward_peak, between + backward_peak);
  backward_end += between;
  pending += next.pending;
  deferred_peak = std::max(deferred_peak, next.deferred_peak);
  postponed = std::max(postponed, next.postponed);
  linears.insert(linears.end(), next.linears.begin(), next.linears.end());
  attentions.insert(attentions.end(), next.attentions.begin(), next.attentions.end());
  score_products += next.score_products;
  recomputed_products += next.recomputed_products;
  moved_elements += next.moved_elements;
  tensor += next.tensor;
  context += next.context;
  expert += next.expert;
  expert_tensor += next.expert_tensor;
}

void SublayerCost::count_per_token_of(double share) {
  for (LinearSize& linear : linears) linear.share *= share;
  score_products *= share;
  recomputed_products *= share;
  moved_elements *= share;
}

void SublayerCost::set_peaks(const std::function<void(AllocationTrack&)>& forward,
                             const std::function<void(AllocationTrack&)>& backward,
                             int64_t unrecorded, bool recomputed) {
  AllocationTrack forwards, backwards;
  unrecorded_peak = unrecorded;
  if (recomputed) {
    forwards.touch(unrecorded);
    forwards.take(saved.residual);
    forward(backwards);
    backwards.give(saved.residual);  // the recomputed output; its gradient is already counted
  } else {
    forward(forwards);
  }
  backward(backwards);
  forward_peak = forwards.most();
  forward_end = forwards.live();
  backward_peak = backwards.most();
  backward_end = backwards.live();
}

// -- a layer of two halves

SavedBytes LayerCost::saved() const {
  SavedBytes all = first.saved;
  return all += second.saved;
}

SavedBytes LayerCost::offloaded() const {
  SavedBytes all = first.offloaded.given;
  return all += second.offloaded.given;
}

LayerCost one_branch_cost(SublayerCost branch) {
  LayerCost cost;
  cost.one_half = true;
  cost.stream = branch.saved.residual;
  cost.not_reloaded = branch.offloaded.given.total() - branch.offloaded.taken;
  cost.first = std::move(branch);
  return cost;
}

int64_t LayerCost::unrecorded_peak() const {
  if (one_half) return first.unrecorded_peak;
  return std::max(first.unrecorded_peak, stream + second.unrecorded_peak);
}

double LayerCost::weight_products() const {
  return first.weight_products() + second.weight_products();
}

double LayerCost::score_products() const { return first.score_products + second.score_products; }

Traffic LayerCost::tensor() const {
  Traffic all = first.tensor;
  return all += second.tensor;
}

Traffic LayerCost::context() const {
  Traffic all = first.context;
  return all += second.context;
}

Traffic LayerCost::expert() const {
  Traffic all = first.expert;
  return all += second.expert;
}

Traffic LayerCost::expert_tensor() const {
  Traffic all = first.expert_tensor;
  return all += second.expert_tensor;
}

KeptBytes LayerCost::kept() const {
  KeptBytes all = first.kept;
  return all += second.kept;
}

int64_t LayerCost::forward_peak(int64_t leaving_first, int64_t leaving_second) const {
  if (one_half) return leaving_first + first.forward_peak;
  return std::max(leaving_first + first.forward_peak,
                  first.forward_end + leaving_second + second.forward_peak);
}

LayerCost::Backward LayerCost::backward_peak(bool grad_is_held, int64_t reloading_second,
                                             int64_t reloading_first) const {
  const int64_t before = reloading_second - not_reloaded, held = grad_is_held ? stream : 0;
  Backward peaks{};
  if (one_half) {
    const int64_t start = reloading_first - not_reloaded;
    peaks.most =
        std::max<int64_t>({0, start + first.backward_peak, start + first.backward_end + held});
    return peaks;
  }
  peaks.second_half =
      std::max<int64_t>({0, before + second.backward_peak, before + second.backward_end + held});
  const int64_t between =
      second.backward_end + second.carried + held - stream - not_reloaded + reloading_first;
  peaks.most = std::max(peaks.second_half, between + first.backward_peak);
  return peaks;
}

RecomputedLayers recomputed_layers(const TransformerConfig& c, int64_t num_layers) {
  if (c.recompute_granularity != RecomputeGranularity::kFull) return {};
  if (c.recompute_method == RecomputeMethod::kBlock) {
    const int64_t layers = std::min(num_layers, c.recompute_num_layers);
    return {layers, layers, layers > 0 ? 1 : 0, 1};
  }
  return {(num_layers + c.recompute_num_layers - 1) / c.recompute_num_layers, num_layers,
          std::min(num_layers, c.recompute_num_layers), c.recompute_num_layers};
}

// -- for the costs of sublayers

void AllocationTrack::take(int64_t bytes) { most_ = std::max(most_, live_ += bytes); }

void AllocationTrack::touch(int64_t bytes) { most_ = std::max(most_, live_ + bytes); }

StreamCost::StreamCost(const TransformerConfig& c, const LayerShape& shape)
    : StreamCost(c, shape, norms_inputs(c)) {}

StreamCost::StreamCost(const TransformerConfig& c, const LayerShape& shape, bool normed_input)
    : stream(shape.rows * c.hidden_size * shape.residual),
      normed(shape.rows * c.hidden_size * shape.element),
      cast(shape.residual == shape.element ? 0 : stream),
      gathered(shape.sequence_parallel ? shape.tokens * c.hidden_size * shape.element : 0),
      product(shape.tokens * c.hidden_size * shape.element),
      part(shape.sequence_parallel ? normed : 0),
      stats(shape.rows * (c.normalization == Normalization::kLayerNorm ? 2 : 1) * shape.sum),
      branch(c.changes_branches(/*training=*/true) || cast > 0 ? normed : 0),
      pre_norm(normed_input),
      recompute_norm(c.recomputes("layernorm")),
      pre_norm_saved(pre_norm ? stats + (recompute_norm ? 0 : normed) : 0),
      post_norm_saved((c.has_post_norm() ? (part > 0 ? part : product) + stats : 0) +
                      (c.branch_scales ? normed : 0)) {}

void StreamCost::column_forward(int64_t output, AllocationTrack& track) const {
  if (pre_norm) track.take(stats + normed + cast);
  track.take(gathered + output);
  track.give(gathered + (pre_norm ? cast : 0));
  if (pre_norm && recompute_norm) track.give(normed);
}

void StreamCost::row_forward(int64_t unsaved, AllocationTrack& track) const {
  track.take(unsaved + product + part);
  track.give(unsaved);
  if (part > 0) track.give(product);
  track.take(post_norm_saved);
  track.take(stream);
  track.give(part > 0 ? part : product);
}

void StreamCost::row_backward(int64_t input, int64_t input_saved, AllocationTrack& track) const {
  track.give(post_norm_saved);
  track.take(branch);
  track.take(gathered + input);
  track.give(gathered + branch + input_saved);
}

void StreamCost::column_backward(int64_t dy, AllocationTrack& track) const {
  track.take(product);
  track.take(part);
  track.touch(gathered + (recompute_norm ? normed + cast : 0));
  if (part > 0) track.give(product);
  track.take(stream + cast);
  track.give(dy + cast + (part > 0 ? part : product) + pre_norm_saved);
  // The norm's backward adds the gradient of the residual path; without a norm the sum is another
  // tensor.
  if (!pre_norm) track.touch(stream);
  track.give(stream);
}

Traffic StreamCost::tensor_traffic(const LayerShape& shape) const {
  // Forward an all-reduce of the row-parallel layer's output, backward one of the column-parallel
  // layer's input gradient; with sequence parallelism an all-gather and a reduce-scatter instead,
  // and in the backward an all-gather of the input, too.
  const double one_way = scatter_bytes(shape.tensor, static_cast<double>(product));
  return {2 * one_way, (shape.sequence_parallel ? 3 : 2) * one_way};
}

bool offload(const TransformerConfig& config, const char* module, int64_t SavedBytes::* kind,
             int64_t bytes, int64_t element, int64_t count, OffloadedBytes& out) {
  if (bytes == 0 || !config.offloads(module) ||
      bytes / count / element < config.min_offloaded_tensor_size)
    return false;
  out.given.*kind += bytes;
  out.taken += bytes;
  return true;
}

// -- for reports

double reported_products(const LayerCost& layer) {
  double products = layer.products();
  for (const SublayerCost* half : {&layer.first, &layer.second})
    for (const LinearSize& linear : half->linears)
      products -= linear.share * static_cast<double>(linear.unreported * linear.inputs);
  return products;
}

}  // namespace megatron
