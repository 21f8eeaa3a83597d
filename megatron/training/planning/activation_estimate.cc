#include "megatron/training/planning/activation_estimate.h"

#include <algorithm>
#include <vector>

#include "megatron/transformer/layer/offloaded_halves.h"

namespace megatron {

namespace {

// One forward and backward of a chunk. Peaks are counted from the start of the pass.
class ChunkPass {
 public:
  ChunkPass(const LayoutPlan& plan, int stage, int chunk);
  PassBytes run();

 private:
  // The peak of a recomputed layer without autograd, its saved bytes, and the peak of its backward.
  struct RecomputedLayer {
    int64_t unrecorded = 0, saved = 0, backward = 0;
  };

  bool is_offloaded(int64_t index) const {
    return index < of_first_stack_
               ? index < num_offloaded_first_
               : index - of_first_stack_ < num_offloaded_ - num_offloaded_first_;
  }
  // The most of each in the layers of one unit.
  RecomputedLayer in_unit(int64_t unit) const;
  void add_recomputed_layer(const LayerCost& layer);
  void add_layer(int64_t index, const LayerCost& layer);
  void add_recomputed_units();
  void add_what_lies_between_stacks();
  void add_what_moves_beside();
  // Whether the chunk has more layers than these.
  bool goes_on_behind(int64_t layers) const { return layers < slice_.num_layers; }
  void hold(int64_t bytes, int64_t after);
  void add_ends();

  const LayoutPlan& plan_;
  const TransformerConfig& config_;
  const StageSlice slice_;
  const EndsCost& ends_;  // with what encoders of media this chunk has
  const RecomputedLayers again_;
  // Layers that offload, of each stack from its first; those of the chunk's first stack
  const int64_t of_first_stack_, num_offloaded_first_, num_offloaded_;
  const int64_t in_flight_;
  const int64_t stream_;
  // The chunk's output gradient is held by the caller until the end and not counted for the last
  // layer; the other layers count their output gradients. In a chunk with the output layer, that
  // gradient comes from the output layer and is added there.
  const int64_t arrived_;
  std::vector<int64_t> streams_;  // of the outputs of embedding and layers, one for each moment
  // Of encoders of media, recomputed units, which are counted by themselves, and recorded layers
  OffloadedHalves halves_;
  int64_t first_unit_ = 0;
  std::vector<int64_t> first_half_;  // of each layer that is recorded
  PassBytes pass_;
  int64_t saved_ = 0;        // by recorded layers, on the device
  int64_t at_the_head_ = 0;  // held in addition while the output layer runs
  std::vector<RecomputedLayer> recomputed_;
};

ChunkPass::ChunkPass(const LayoutPlan& plan, int stage, int chunk)
    : plan_(plan),
      config_(plan.model()),
      slice_(plan.stages.slice(stage, chunk)),
      ends_(plan.ends_of(stage, chunk)),
      again_(recomputed_layers(config_, slice_.num_layers)),
      of_first_stack_(
          std::clamp<int64_t>(plan.ends.first_stack - slice_.first_layer, 0, slice_.num_layers)),
      num_offloaded_first_(config_.num_offloaded_layers(
          of_first_stack_, slice_.first_layer + slice_.num_layers >= plan.ends.first_stack)),
      num_offloaded_(num_offloaded_first_ + config_.num_offloaded_layers(
                                                slice_.num_layers - of_first_stack_, slice_.head)),
      in_flight_(config_.fine_grained_offloading_max_inflight_offloads),
      stream_(slice_.encodes_alone() ? 0 : plan.stream_bytes()),
      arrived_(slice_.head ? 0 : stream_),
      halves_(in_flight_) {
  // The embedding's output, and its gradient
  const bool begins = slice_.embedding || slice_.num_parts > 0;
  const EndCost& embedding = ends_.embedding;
  const int64_t backward = arrived_ + stream_ + embedding.backward_peak;
  pass_.moments.push_back({std::max(stream_, begins ? embedding.forward_peak : 0),
                           begins ? backward : arrived_ + stream_,
                           begins ? backward : arrived_ + stream_});
  streams_.push_back(stream_);
  for (const OffloadedBytes& half : ends_.offloaded) {
    if (!begins) break;
    halves_.add(half);
    pass_.offloaded += half.taken;
  }
  first_unit_ = halves_.count();
  for (int64_t unit = 0; unit < again_.units; ++unit) halves_.add({});
}

PassBytes ChunkPass::run() {
  std::vector<LayerCost> layers;
  for (int64_t i = 0; i < slice_.num_layers; ++i) {
    layers.push_back(
        plan_.layer_cost(slice_.first_layer + i + 1, i >= again_.layers && is_offloaded(i)));
    if (i < again_.layers) continue;
    first_half_.push_back(halves_.count());
    halves_.add(layers.back().first.offloaded);
    if (!layers.back().one_half) halves_.add(layers.back().second.offloaded);
  }
  pass_.moments.resize(layers.size() + 3);
  for (const LayerCost& layer : layers) streams_.push_back(layer.stream);
  streams_.resize(pass_.moments.size(), streams_.back());
  pass_.leaving = halves_.leaving_at_the_end();
  at_the_head_ = halves_.leaving_at_the_head();
  for (int64_t i = 0; i < std::ssize(layers); ++i) {
    const LayerCost& layer = layers[static_cast<size_t>(i)];
    pass_.pending += layer.first.pending + layer.second.pending;
    pass_.deferred_extra =
        std::max({pass_.deferred_extra, layer.first.deferred_peak, layer.second.deferred_peak});
    pass_.postponed = std::max({pass_.postponed, layer.first.postponed, layer.second.postponed});
    if (i < again_.layers)
      add_recomputed_layer(layer);
    else
      add_layer(i, layer);
  }
  // In addition to the saved bytes.
  for (PassMoment& moment : pass_.moments) {
    moment.forward -= saved_;
    moment.backward -= saved_;
    moment.backward_first -= saved_;
  }
  if (again_.units > 0) add_recomputed_units();
  add_what_lies_between_stacks();
  add_what_moves_beside();
  add_ends();
  const auto most = [&](int64_t PassMoment::* bytes) {
    return std::ranges::max(pass_.moments, {}, bytes).*bytes;
  };
  pass_.forward_extra = most(&PassMoment::forward);
  pass_.backward_extra = most(&PassMoment::backward);
  pass_.backward_first = most(&PassMoment::backward_first);
  return pass_;
}

ChunkPass::RecomputedLayer ChunkPass::in_unit(int64_t unit) const {
  RecomputedLayer most;
  const int64_t first = unit * again_.unit_layers;
  for (int64_t i = first; i < std::min(first + again_.unit_layers, again_.layers); ++i) {
    const RecomputedLayer& layer = recomputed_[static_cast<size_t>(i)];
    most.unrecorded = std::max(most.unrecorded, layer.unrecorded);
    most.saved = std::max(most.saved, layer.saved);
    most.backward = std::max(most.backward, layer.backward);
  }
  return most;
}

void ChunkPass::add_recomputed_layer(const LayerCost& layer) {
  RecomputedLayer most;
  if (layer.parts.empty())
    most = {layer.unrecorded_peak(), layer.saved().total(),
            layer.backward_peak(/*grad_is_held=*/true).most};
  for (const LayerCost::Part& part : layer.parts) {
    most.unrecorded = std::max(most.unrecorded, part.unrecorded_peak);
    if (part.saved + part.backward_peak < most.saved + most.backward) continue;
    most.saved = part.saved;
    most.backward = part.backward_peak;
  }
  recomputed_.push_back(most);
  pass_.saved.residual += layer.held_for_parts;
}

void ChunkPass::add_layer(int64_t index, const LayerCost& layer) {
  const int64_t half = first_half_[static_cast<size_t>(index - again_.layers)];
  const bool offloaded = is_offloaded(index);
  SavedBytes saved = layer.saved();
  const int64_t whole = saved.total();
  PassMoment& moment = pass_.moments[static_cast<size_t>(index) + 1];
  moment.forward = saved_ + layer.stream +
                   layer.forward_peak(halves_.leaving(half, half), halves_.leaving(half + 1, half));
  const bool grad_is_held = !slice_.head && index + 1 == slice_.num_layers;
  // Both halves of an offloaded layer are reloaded before the first is used.
  const LayerCost::Backward backward = layer.backward_peak(
      grad_is_held, offloaded ? 0 : halves_.reloading(half), halves_.reloading(half));
  const int64_t before = saved_ + whole + (grad_is_held ? 0 : arrived_);
  moment.backward = before + backward.most;
  if (halves_.may_be_leaving(half)) {
    moment.backward_first = before + backward.most;
  } else if (!layer.one_half && halves_.may_be_leaving(half + 1)) {
    moment.backward_first = before + backward.second_half;
  }
  saved -= layer.offloaded();
  pass_.offloaded += layer.first.offloaded.taken + layer.second.offloaded.taken;
  pass_.saved += saved;
  saved_ += saved.total();
}

void ChunkPass::add_recomputed_units() {
  // Inputs distributed over the tensor ranks are gathered for the backward of their unit.
  const bool parts = config_.distribute_saved_activations;
  OffloadedBytes input_bytes;
  const bool to_host = num_offloaded_ > 0 && offload(config_, "attn_norm", &SavedBytes::residual,
                                                     stream_, plan_.bytes.residual, 1, input_bytes);
  const int64_t offloaded_units = !to_host ? 0
                                  : num_offloaded_ >= again_.layers
                                      ? again_.units
                                      : std::min(again_.units, num_offloaded_ / again_.unit_layers);
  const auto kept = [&](int64_t stream) {
    return parts ? (stream + plan_.tensor - 1) / plan_.tensor : stream;
  };
  const int64_t input = kept(stream_);
  for (int64_t i = offloaded_units; i < again_.units; ++i)
    pass_.saved.residual += kept(streams_[static_cast<size_t>(1 + i * again_.unit_layers)]);
  pass_.offloaded += offloaded_units * stream_;
  // Recomputed layers come before the others. During the backward of a unit its saved tensors
  // (without its input) and its output gradient are held; for the last unit that may be the
  // chunk's output gradient; units before it hold one input less. A distributed input is whole
  // while its unit runs, and so is the first one while the receive from another stage holds it;
  // an offloaded input is freed later, and another one is reloaded meanwhile.
  const int64_t last_input = offloaded_units == again_.units ? 0 : input;
  int64_t whole =
      parts ? stream_ - input + (slice_.embedding || again_.units == 1 ? 0 : stream_) : 0;
  whole += std::min(offloaded_units, in_flight_ + (last_input == 0 ? 1 : 0)) * stream_;
  if (first_half_.empty())
    (last_input == 0 ? pass_.leaving : at_the_head_) +=
        std::min(offloaded_units, in_flight_) * stream_;
  if (!slice_.embedding && (parts || offloaded_units > 0)) at_the_head_ += stream_;
  const int64_t own = again_.layers < slice_.num_layers ? arrived_
                      : again_.units > 1 ? std::max<int64_t>(0, arrived_ - last_input)
                                         : 0;
  for (int64_t i = 0; i < again_.layers; ++i) {
    const int64_t number = i / again_.unit_layers;
    const RecomputedLayer most = in_unit(number);
    const int64_t unit_input =
        last_input == 0 ? 0 : kept(streams_[static_cast<size_t>(1 + number * again_.unit_layers)]);
    PassMoment& unit = pass_.moments[static_cast<size_t>(i) + 1];
    const int64_t group = first_unit_ + number;
    unit.forward = most.unrecorded + whole - saved_ + (again_.longest > 1 ? stream_ : 0) +
                   halves_.held_before(group);
    unit.backward = again_.longest * most.saved + most.backward + own - unit_input - saved_ +
                    (offloaded_units > 0 ? stream_ : halves_.reloading(group));
    unit.backward_first = first_half_.empty() ? unit.backward : -saved_;
  }
}

// Layers of the first stack run before it is saved, and run backward after it has been freed.
void ChunkPass::add_what_lies_between_stacks() {
  const EndsCost& ends = plan_.ends;
  const int64_t before = ends.first_stack - slice_.first_layer;
  if (ends.first_stack == 0) return;
  // The output of the first stack is held for layers of the second one.
  const bool read = goes_on_behind(before);
  hold(before > 0 ? ends.between_stacks - (read ? 0 : ends.passed_on) : ends.passed_on, before);
}

void ChunkPass::add_what_moves_beside() {
  const EndsCost& ends = plan_.ends;
  const int64_t before = ends.passed_from - slice_.first_layer;
  if (slice_.encodes_alone() || slice_.first_layer >= ends.passed_until) return;
  hold(ends.passed_beside, before);
}

// Saves bytes behind layer `after` of the chunk, counted from 1; 0 or less: from its beginning on,
// more than it has: nowhere.
void ChunkPass::hold(int64_t bytes, int64_t after) {
  if (!goes_on_behind(after - 1)) return;
  pass_.saved.ends += bytes;
  for (int64_t i = 0; after > 0 && i <= after; ++i)
    for (int64_t PassMoment::* peak :
         {&PassMoment::forward, &PassMoment::backward, &PassMoment::backward_first})
      pass_.moments[static_cast<size_t>(i)].*peak -= bytes;
}

// Layers run before the head saves anything, and run backward after it has freed everything.
void ChunkPass::add_ends() {
  const EndsCost& ends = ends_;
  if (slice_.embedding || slice_.num_parts > 0) {
    pass_.saved.ends += ends.embedding.saved - ends.encoder - ends.features;
    pass_.saved.encoder += ends.encoder;
    pass_.saved.features += ends.features;
    pass_.pending += ends.embedding.pending;
  }
  if (!slice_.head) return;
  const EndCost& head = ends.head;
  pass_.saved.ends += head.saved;
  pass_.pending += head.pending;
  for (size_t i = 0; i < pass_.moments.size(); ++i) {
    pass_.moments[i].forward -= head.saved;
    pass_.moments[i].backward += streams_[i] - head.saved;
    pass_.moments[i].backward_first += streams_[i] - head.saved;
  }
  // While the output layer runs, the last half layer is being reloaded.
  const int64_t reloading = plan_.splits_vocabulary() ? 0 : halves_.reloading_at_the_end();
  const auto moment = [&](int64_t forward, int64_t backward) {
    return PassMoment{forward + at_the_head_, backward + reloading, backward + reloading};
  };
  pass_.moments.end()[-2] = moment(head.norm_forward_peak, head.norm_backward_peak);
  if (!plan_.splits_vocabulary())
    pass_.moments.back() = moment(head.forward_peak, head.backward_peak);
}

}  // namespace

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk) {
  return ChunkPass(plan, stage, chunk).run();
}

}  // namespace megatron
