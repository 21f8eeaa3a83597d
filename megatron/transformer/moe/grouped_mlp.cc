#include "megatron/transformer/moe/grouped_mlp.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A matrix of every expert, [E, rows, columns], or a bias [E, rows]. Dimension 0 is divided over
// the ranks of the experts, and `divided` in equal pieces of `parts` over the expert-tensor ranks.
void describe(Parameter& parameter, std::vector<int64_t> shape, const GroupedMlpOptions& options,
              const ParallelGroups& groups, int divided, const std::vector<int64_t>& parts) {
  const int64_t ep = groups.group({Axis::kExpert}).size(),
                etp = groups.group({Axis::kExpertTensor}).size();
  MEGATRON_CHECK(options.num_experts % ep == 0, options.num_experts,
                 " experts are not divisible by ", ep, " expert-parallel ranks");
  MEGATRON_CHECK(options.ffn_size % etp == 0, "the width ", options.ffn_size,
                 " of an expert is not divisible by ", etp, " expert-tensor ranks");
  parameter.global_shape = shape;
  parameter.placement.shards = {{0, Axis::kExpert, {}}};
  parameter.placement.expert = true;
  shape[0] /= ep;
  if (divided > 0) {
    parameter.placement.shards.push_back({divided, Axis::kExpertTensor, parts});
    shape[static_cast<size_t>(divided)] /= etp;
  }
  parameter.local_shape = std::move(shape);
}

}  // namespace

std::vector<at::Tensor> GroupedMlpRows::tensors() const {
  const QuantizedMatrix& columns = activation.codes.columns;
  return {x, weights, fc1, activation.plain, columns.codes, columns.scale, activation.amax};
}

GroupedMlpRows GroupedMlpRows::of(const std::vector<at::Tensor>& tensors) {
  GroupedMlpRows rows{tensors[0], tensors[1], tensors[2], {tensors[3], {}, tensors[6]}};
  // One scale per expert is a row of several elements.
  const bool blocks = tensors[5].defined() && tensors[5].dim() == 1;
  rows.activation.codes.columns = {tensors[4], tensors[5],
                                   blocks ? ScaleLayout::kVector128 : ScaleLayout::kTensor};
  return rows;
}

GroupedMlp::GroupedMlp(const GroupedMlpOptions& options, const ParallelGroups& groups)
    : options_(options),
      fc1_(fc1_weight, options.quantization),
      fc2_(fc2_weight, options.quantization) {
  const int64_t e = options.num_experts, h = options.input_size, f = options.ffn_size;
  const std::vector<int64_t> parts =
      is_gated(options.activation.kind) ? std::vector<int64_t>{f, f} : std::vector<int64_t>{f};
  const int64_t fc1_rows = f * static_cast<int64_t>(parts.size());
  MEGATRON_CHECK(!options.bias || groups.group({Axis::kExpertTensor}).size() == 1,
                 "experts with biases are not divided over expert-tensor ranks");
  describe(fc1_weight, {e, fc1_rows, h}, options, groups, 1, parts);
  describe(fc1_bias, {e, fc1_rows}, options, groups, 0, {});
  describe(fc2_weight, {e, h, f}, options, groups, 2, {});
  describe(fc2_bias, {e, h}, options, groups, 0, {});
  fc1_weight.init = options.fc1_init;
  fc2_weight.init = options.fc2_init;
  fc1_bias.role = fc2_bias.role = ParameterRole::kBias;
}

GroupedMlp::Values::Values(GroupedMlp& mlp, bool backward) {
  const auto take = [](std::optional<AcquiredValue>& value, Parameter& parameter) {
    value.emplace(&parameter);
  };
  const auto take_fc1 = [&] {
    take(fc1_weight_, mlp.fc1_weight);
    if (mlp.has_bias()) take(fc1_bias_, mlp.fc1_bias);
  };
  if (!backward) take_fc1();
  take(fc2_weight_, mlp.fc2_weight);
  if (mlp.has_bias()) take(fc2_bias_, mlp.fc2_bias);
  if (backward) take_fc1();
}

// With several rounds the gradient is complete after the last one. It is reported as late as that
// of one round is, because ranks report in the same order whatever their rounds.
void GroupedMlp::Gradients::add(Sum& sum, std::function<void(const GradTarget&)> accumulate) const {
  Parameter& parameter = *sum.parameter;
  if (rounds_ == 1) return run_weight_gradient(parameter, std::move(accumulate));
  if (!parameter.trainable) return;
  if (!sum.target) sum.target = parameter.store->grad_target(parameter);
  accumulate(*sum.target);
  sum.target->beta = 1.0;
  if (++sum.rounds < rounds_) return;
  const auto ready = [&parameter] { parameter.store->grad_ready(parameter); };
  if (!parameter.store->defer(ready)) ready();
}

void GroupedMlp::forward_fc1(const Values& values, const ExpertCounts& counts,
                             GroupedMlpRows& rows) const {
  rows.fc1 = fc1_.forward(fc1_.input(rows.x, counts), values.fc1_weight_->value(), counts);
  if (!options_.bias) return;
  const at::Tensor expert = experts_of_rows(counts.rows, rows.x.size(0));
  rows.fc1.add_(values.fc1_bias_->value().index_select(0, expert));
}

at::Tensor GroupedMlp::fc2_output(const Values& values, const ExpertCounts& counts,
                                  const GroupedMlpRows& rows,
                                  const ExpertOperand& activation) const {
  const at::Tensor y = fc2_.forward(activation, values.fc2_weight_->value(), counts);
  if (!options_.bias) return y;
  const at::Tensor expert = experts_of_rows(counts.rows, y.size(0));
  const at::Tensor bias =
      values.fc2_bias_->value().to(rows.weights.scalar_type()).index_select(0, expert);
  return (y + bias.mul_(rows.weights.unsqueeze(1))).to(y.scalar_type());
}

at::Tensor GroupedMlp::forward(const Values& values, const ExpertCounts& counts,
                               GroupedMlpRows& rows) const {
  const at::NoGradGuard no_grad;
  forward_fc1(values, counts, rows);
  if (fc2_.quantizes_activation() && !options_.recompute_activation) {
    rows.activation = fc2_.activated_input(rows.fc1, rows.weights, options_.activation, counts);
    const at::Tensor y = fc2_output(values, counts, rows, rows.activation);
    rows.activation.codes.rows = {};
    return y;
  }
  const at::Tensor activation = weighted_activation(rows.fc1, rows.weights, options_.activation);
  if (!options_.recompute_activation) rows.activation.plain = activation;
  return fc2_output(values, counts, rows, fc2_.input(activation, counts));
}

GroupedMlp::Backward GroupedMlp::backward(const Values& values, const at::Tensor& dy,
                                          const ExpertCounts& counts, const GroupedMlpRows& rows,
                                          const std::shared_ptr<Gradients>& gradients) const {
  const at::NoGradGuard no_grad;
  const ExpertOperand fc2_grad = fc2_.gradient(dy, counts);
  at::Tensor dactivation = fc2_.input_grad(fc2_grad, values.fc2_weight_->value(), counts);
  const bool kept = rows.activation.defined();
  WeightedActivationGrads act =
      weighted_activation_backward(dactivation, rows.fc1, rows.weights, options_.activation,
                                   {.y = !kept, .amax = fc1_.uses_row_amax()});
  dactivation.reset();
  Backward result;
  const ExpertOperand fc1_grad = fc1_.gradient(act.dx, counts, act.amax);
  const at::Tensor du = options_.bias ? act.dx : at::Tensor();
  act.dx.reset();
  result.rows.rows = fc1_.input_grad(fc1_grad, values.fc1_weight_->value(), counts);
  result.rows.weights = act.dweights;
  if (options_.bias) {
    const at::Tensor bias = values.fc2_bias_->value().to(act.dweights.scalar_type());
    result.rows.weights.add_(
        bias.index_select(0, experts_of_rows(counts.rows, dy.size(0))).mul_(dy).sum(-1));
  }
  const ExpertOperand activation = kept ? rows.activation : ExpertOperand{act.y, {}};
  result.rows.meanwhile = [this, gradients, counts, fc2_grad, activation, weights = rows.weights,
                           dy = options_.bias ? dy : at::Tensor()] {
    Gradients& sums = *gradients;
    const ExpertOperand input = fc2_.saved_input(activation, counts);
    sums.add(sums.fc2_weight_, [this, fc2_grad, input, rows = counts.rows](const auto& target) {
      fc2_.weight_grad(fc2_grad, input, rows, target);
    });
    if (!options_.bias) return;
    sums.add(sums.fc2_bias_, [dy, weights, rows = counts.rows](const GradTarget& target) {
      sum_rows_of_experts(dy, rows, weights, target.tensor, target.beta);
    });
  };
  result.fc1 = [this, gradients, counts, fc1_grad, x = rows.x, du] {
    Gradients& sums = *gradients;
    const ExpertOperand input = fc1_.saved_input({x, {}}, counts);
    sums.add(sums.fc1_weight_, [this, fc1_grad, input, rows = counts.rows](const auto& target) {
      fc1_.weight_grad(fc1_grad, input, rows, target);
    });
    if (!options_.bias) return;
    sums.add(sums.fc1_bias_, [du, rows = counts.rows](const GradTarget& target) {
      sum_rows_of_experts(du, rows, at::Tensor(), target.tensor, target.beta);
    });
  };
  return result;
}

}  // namespace megatron
