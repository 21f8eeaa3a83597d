#include "megatron/models/mimo/encoder_cost.h"

#include <algorithm>
#include <utility>

namespace megatron {

EncoderCost::EncoderCost(MimoConfig config_of_media, TransformerConfig layers_of_encoder,
                         const Projector& its_projector, const ModelConfig& config,
                         const EndsShape& of)
    : own(std::move(config_of_media)),
      language(config.transformer),
      layers(std::move(layers_of_encoder)),
      projector(its_projector),
      given(of.layer),
      part(of.segment != nullptr ? encoder_part(*of.segment, layers.num_layers)
                                 : EncoderPart{0, layers.num_layers}),
      places(of.segment == nullptr || of.segment->embedding),
      trains_encoder(!of.trains || of.trains(projector.encoder)),
      trains_projector(!of.trains || of.trains(projector.name)),
      apart(own.encodes_apart() && of.segment != nullptr),
      ranks(!apart            ? (own.divides_encoders() ? 1 : given.tensor) * given.context
            : part.is_there() ? own.encoder_data_parallel_size
                              : 1) {
  if (trains_encoder) again = recomputed_layers(layers, part.count);
}

void EncoderCost::set_samples(int64_t samples) {
  shape = given;
  shape.samples = samples;
  shape.tokens = shape.rows = rows;
  shape.residual = shape.element;
  shape.tensor = own.divides_encoders() ? given.tensor : 1;
  shape.context = 1;
  shape.context_levels.clear();
  shape.sequence_parallel = shape.documents = shape.padded = false;
  shape.unpadded = true;
}

std::span<const LayerCost> EncoderCost::of_unit(int64_t unit) const {
  const int64_t first = unit * again.unit_layers;
  return std::span(costs).subspan(
      static_cast<size_t>(first),
      static_cast<size_t>(std::min(again.unit_layers, again.layers - first)));
}

std::span<const LayerCost> EncoderCost::recorded() const {
  return std::span(costs).subspan(static_cast<size_t>(again.layers));
}

std::vector<OffloadedBytes> EncoderCost::offloaded() const {
  if (!trains_encoder || !layers.offloads_activations()) return {};
  OffloadedBytes input;
  offload(layers, "attn_norm", &SavedBytes::residual, width(), shape.element, 1, input);
  std::vector<OffloadedBytes> out(static_cast<size_t>(again.units), input);
  for (const LayerCost& layer : recorded()) {
    out.push_back(layer.first.offloaded);
    out.push_back(layer.second.offloaded);
  }
  return out;
}

OffloadedHalves EncoderCost::halves() const {
  OffloadedHalves out(language.fine_grained_offloading_max_inflight_offloads);
  std::vector<OffloadedBytes> to_host = offloaded();
  to_host.resize(static_cast<size_t>(again.units) + 2 * recorded().size());
  for (const OffloadedBytes& half : to_host) out.add(half);
  return out;
}

int64_t EncoderCost::middle() const {
  if (projector.type != VisionProjection::kMlp) return 0;
  return projector.ffn_hidden_size > 0 ? projector.ffn_hidden_size : language.hidden_size;
}

int64_t EncoderCost::arrived() const {
  if (part.is_there()) return (trains_encoder ? 1 : 2) * width();
  // Of several ranks of the encoders' own, in parts and as one
  return (ranks > 1 || (apart && own.encoder_data_parallel_size > 1) ? 2 : 1) * given_rows();
}

int64_t EncoderCost::layers_saved() const {
  int64_t saved = again.units * width();
  for (const LayerCost& layer : recorded()) saved += layer.saved().total();
  for (const OffloadedBytes& half : offloaded()) saved -= half.given.total();
  return saved;
}

int64_t EncoderCost::layers_pending() const {
  int64_t bytes = 0;
  for (const LayerCost& layer : costs) bytes += layer.first.pending + layer.second.pending;
  return bytes;
}

void EncoderCost::forward_layers(AllocationTrack& track) const {
  const std::vector<OffloadedBytes> to_host = offloaded();
  const OffloadedHalves groups = halves();
  // What the segment before gave is held by the receive.
  if (!begins() && !to_host.empty()) track.take(to_host.front().given.residual);
  for (int64_t unit = 0; unit < again.units; ++unit) {
    int64_t most = 0;
    for (const LayerCost& layer : of_unit(unit)) most = std::max(most, layer.unrecorded_peak());
    track.take(width());  // its output; its input is there
    track.touch(most + groups.held_before(unit) + (again.longest > 1 ? width() : 0));
    track.give(groups.given(unit));
  }
  int64_t half = again.units;
  for (const LayerCost& layer : recorded()) {
    if (trains_encoder) {
      track.touch(layer.forward_peak(groups.leaving(half, half), groups.leaving(half + 1, half)));
      // Its input is there, its output comes
      track.take(layer.saved().total() - layer.offloaded().total());
      half += 2;
    } else {
      track.touch(layer.stream + layer.unrecorded_peak());
    }
  }
  track.take(groups.held_before(groups.count()));  // until layers of the language model begin
}

void EncoderCost::backward_layers(AllocationTrack& track) const {
  const OffloadedHalves groups = halves();
  track.give(reloading());
  const std::span<const LayerCost> last_first = recorded();
  for (size_t i = last_first.size(); i-- > 0;) {
    const bool held = !ends() && i + 1 == last_first.size();  // of a transfer
    const LayerCost& layer = last_first[i];
    const int64_t reloading = groups.reloading(again.units + 2 * static_cast<int64_t>(i)),
                  to_host = layer.offloaded().total();
    track.touch(to_host + layer.backward_peak(held, to_host > 0 ? 0 : reloading, reloading).most);
    track.give(layer.saved().total() - to_host);
  }
  for (int64_t unit = again.units; unit-- > 0;) {
    const int64_t input = width() - groups.given(unit);  // that is there
    int64_t saved_again = -input, most = 0;
    for (const LayerCost& layer : of_unit(unit)) {
      saved_again += layer.saved().total();
      most = std::max(most, layer.backward_peak(/*grad_is_held=*/true).most);
    }
    track.touch(saved_again + most + groups.reloading(unit));
    track.give(input);
  }
}

void EncoderCost::gather_features(AllocationTrack& track) const {
  if (apart && own.encoder_data_parallel_size > 1) track.touch(given_rows());  // by their places
  if (ranks == 1) return;
  const int64_t whole = given_rows() * ranks;
  track.take(given_rows() + whole);
  track.give(2 * given_rows());
  track.take(whole);  // those that are taken
  track.give(whole);
}

void EncoderCost::backward_places(AllocationTrack& track) const {
  const int64_t whole = given_rows() * ranks;
  track.take(of_sequences());  // of the placed rows, then of the features
  track.take(whole);
  track.give(of_sequences());
  if (apart && own.encoder_data_parallel_size > 1) track.touch(whole);  // in the order of the ranks
  if (ranks == 1) return;
  track.take(whole);  // in the order of the ranks
  track.give(whole);
  track.take(given_rows());
  track.give(whole);
}

ModuleCost EncoderCost::encoder_module(double before) const {
  ModuleCost cost{projector.encoder, before};
  const double of_rank = static_cast<double>(rows) / static_cast<double>(shape.tensor);
  for (const LayerCost& layer : costs) {
    cost.weights += of_rank * layer.weight_products();
    cost.scores += of_rank * layer.score_products();
    cost.moved += of_rank * (layer.first.moved_elements + layer.second.moved_elements);
  }
  for (int64_t unit = 0; unit < again.units; ++unit)
    for (const LayerCost& layer : of_unit(unit)) cost.again += of_rank * layer.products();
  cost.weight_grads = cost.grads = trains_encoder;
  return cost;
}

ModuleCost EncoderCost::projector_module() const {
  const auto in = static_cast<double>(projector.feature_size),
             out = static_cast<double>(language.hidden_size), wide = static_cast<double>(middle()),
             of_rank = static_cast<double>(features);
  ModuleCost cost{projector.name, of_rank * (wide > 0 ? wide * (in + out) : in * out)};
  cost.moved = 5 * of_rank * wide;
  cost.weight_grads = trains_projector;
  cost.grads = trains();
  return cost;
}

// Of tensor ranks that divide the encoder: sums of its layers, and of the gradients of features,
// which are of each rank's tokens.
Traffic EncoderCost::divided_traffic() const {
  Traffic sent;
  for (const LayerCost& layer : costs) {
    sent.forward += layer.tensor().forward;
    if (trains_encoder) sent.backward += layer.tensor().backward;
  }
  for (int64_t unit = 0; unit < again.units; ++unit)
    for (const LayerCost& layer : of_unit(unit)) sent.backward += layer.tensor().forward;
  if (places && trains() && given.sequence_parallel)
    sent.backward += 2 * scatter_bytes(given.tensor, static_cast<double>(given_rows()));
  return sent;
}

void EncoderCost::add_ahead(const AllocationTrack& forward, EndsCost& cost) const {
  if (trains_encoder || !begins() || !ends() || own.microbatches_ahead() == 0) return;
  EndsCost::Ahead& ahead = cost.ahead;
  ahead.microbatches = own.microbatches_ahead();
  ahead.peak = std::max(ahead.peak, forward.most());
  if (read() < ahead.features) return;  // the worst micro-batch has media of the other encoder
  ahead.features = read();
  ahead.saved = trains_projector;
}

void EncoderCost::add_traffic(EndCost& cost) const {
  const bool divided = own.divides_encoders();
  const int64_t of_tensor_ranks = given_rows() * (divided ? 1 : given.tensor);
  if (divided || (apart && places)) {
    cost.tensor += divided_traffic();
  } else if (places && given.tensor > 1) {
    const double one_way = scatter_bytes(given.tensor, static_cast<double>(of_tensor_ranks));
    cost.tensor += {one_way, trains() && given.sequence_parallel ? one_way : 0};
  }
  if (places && given.context > 1) {
    const double one_way =
        scatter_bytes(given.context, static_cast<double>(of_tensor_ranks * given.context));
    cost.context += {one_way, trains() ? one_way : 0};
  }
}

}  // namespace megatron
