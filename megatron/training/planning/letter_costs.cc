#include "megatron/training/planning/letter_costs.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>

#include "megatron/training/arguments/layer_division.h"
#include "megatron/transformer/config/letters.h"

namespace megatron {
namespace {

// Of layers by their number from 1.
std::map<int64_t, int64_t> layer_parameters(const LayoutPlan& plan) {
  constexpr std::string_view kLayers = "decoder.layers.";
  std::map<int64_t, int64_t> elements;
  for (int stage = 0; stage < plan.stages.num_stages(); ++stage)
    for (const std::unique_ptr<Model>& chunk : plan.held_by(stage).chunks)
      chunk->visit([&](const std::string& name, Parameter& parameter) {
        if (!name.starts_with(kLayers)) return;
        int64_t layer = 0;
        std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
        elements[layer + 1] += stage_elements(plan, stage, parameter);
      });
  return elements;
}

double sent_bytes(const LayerCost& layer) {
  double bytes = 0;
  for (const Traffic& traffic :
       {layer.tensor(), layer.context(), layer.expert(), layer.expert_tensor()})
    bytes += traffic.forward + traffic.backward;
  return bytes;
}

}  // namespace

std::vector<LetterCosts> letter_costs(const LayoutPlan& plan) {
  std::vector<LetterCosts> letters;
  if (!plan.model().is_hybrid()) return letters;
  const std::map<int64_t, int64_t> parameters = layer_parameters(plan);
  const double milliseconds =
      1e3 * static_cast<double>(plan.tokens()) / static_cast<double>(plan.tensor);
  int64_t number = 0;
  for (const char letter : plan.model().hybrid_letters()) {
    ++number;
    const auto known = std::ranges::find(letters, letter, &LetterCosts::letter);
    if (known != letters.end()) {
      ++known->layers;
      continue;
    }
    const LayerCost cost = plan.layer_cost(number);
    const PassCosts seconds = layer_seconds(plan.model(), cost);
    letters.push_back({letter, std::string(find_letter(letter)->name), 1, parameters.at(number),
                       cost.saved().total(), sent_bytes(cost), milliseconds * seconds.forward,
                       milliseconds * (seconds.backward_input + seconds.backward_weight)});
  }
  return letters;
}

}  // namespace megatron
