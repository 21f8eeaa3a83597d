#include "megatron/training/planning/module_costs.h"

#include "megatron/training/arguments/layer_division.h"

namespace megatron {
namespace {

constexpr double kMilliseconds = 1e3;

// Parameters of the model whose names begin so.
void count_parameters(const LayoutPlan& plan, std::string_view prefix, ModuleReport& out) {
  for (int stage = 0; stage < plan.stages.num_stages(); ++stage)
    for (const std::unique_ptr<Model>& chunk : plan.held_by(stage).chunks)
      for (const Parameter* p : chunk->parameters()) {
        if (!p->name.starts_with(prefix)) continue;
        const int64_t elements = stage_elements(plan, stage, *p);
        out.parameters += elements;
        if (p->trainable) out.trained += elements;
      }
}

void add_time(const ModuleCost& cost, const PassCosts& seconds, ModuleReport& out) {
  out.forward_flops += 2 * (cost.weights + cost.scores);
  out.forward_ms += kMilliseconds * seconds.forward;
  if (cost.grads) {
    out.backward_flops += 2 * (cost.weights + 2 * cost.scores);
    out.backward_ms += kMilliseconds * seconds.backward_input;
  }
  if (cost.weight_grads) {
    out.backward_flops += 2 * cost.weights;
    out.backward_ms += kMilliseconds * seconds.backward_weight;
  }
}

ModuleCost in_all(const ModuleCost& one, double tokens) {
  ModuleCost out = one;
  out.weights *= tokens, out.scores *= tokens, out.moved *= tokens;
  return out;
}

}  // namespace

std::string module_name(std::string_view prefix) {
  return std::string(prefix.substr(0, prefix.size() - 1));
}

std::vector<ModuleReport> module_reports(const LayoutPlan& plan) {
  std::vector<ModuleReport> out;
  if (plan.ends.modules.empty()) return out;
  bool grads = false;  // of the first layer's input
  const LayoutPlan& media = plan.encoders != nullptr ? *plan.encoders : plan;
  for (const ModuleCost& cost :
       plan.encoders != nullptr ? media.ends_of(0, 0).modules : plan.ends.modules) {
    ModuleReport& report = out.emplace_back(ModuleReport{module_name(cost.name)});
    count_parameters(media, cost.name, report);
    add_time(cost, work_seconds(cost.weights, cost.scores, cost.again, cost.moved), report);
    grads |= cost.grads;
  }
  const ModelConfig config = plan.model_config();
  const std::string_view prefix = find_model_type(config.type).language_model;
  ModuleReport& language = out.emplace_back(ModuleReport{module_name(prefix)});
  count_parameters(plan, prefix, language);
  const double tokens = static_cast<double>(plan.tokens()) / static_cast<double>(plan.tensor);
  const auto add = [&](ModuleCost cost, const PassCosts& of_token) {
    cost.weight_grads = language.trained > 0;
    cost.grads = grads || cost.weight_grads;
    add_time(in_all(cost, tokens),
             {tokens * of_token.forward, tokens * of_token.backward_input,
              tokens * of_token.backward_weight},
             language);
  };
  for (int64_t number = 1; number <= config.transformer.num_layers; ++number) {
    const LayerCost layer = plan.layer_cost(number);
    add({"", layer.weight_products(), layer.score_products()},
        layer_seconds(config.transformer, layer));
  }
  add({"", plan.ends.head_products}, work_seconds(plan.ends.head_products, 0, 0, 0));
  return out;
}

}  // namespace megatron
