#include "megatron/transformer/moe/routed_experts.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SavedDispatch : torch::CustomClassHolder {
  std::shared_ptr<TokenDispatch> tokens;
  GroupedMlp* mlp = nullptr;
};

// Saved: x and weights of the tokens, where a round is exchanged again or nothing was exchanged;
// and of the first round what GroupedMlp left.
struct RoutedExpertsFunction : torch::autograd::Function<RoutedExpertsFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weights, const at::Tensor&,
                            const std::shared_ptr<TokenDispatch>& tokens, GroupedMlp* mlp) {
    auto saved = c10::make_intrusive<SavedDispatch>();
    saved->tokens = tokens;
    saved->mlp = mlp;
    context->saved_data["dispatch"] = c10::IValue::make_capsule(saved);
    const GroupedMlp::Values values(*mlp, /*backward=*/false);
    const RowsOfRound inputs = tokens->to_experts(x, weights);
    GroupedMlpRows first;
    const ExpertRows y = tokens->from_experts([&](int64_t round) {
      GroupedMlpRows rows = rows_of(inputs(round));
      const at::Tensor output = mlp->forward(values, tokens->counts(round), rows);
      if (round == 0) first = std::move(rows);
      return ExpertRows{output, {}, {}};
    });
    const bool again = tokens->rounds() > 1 || !tokens->communicates();
    if (!tokens->communicates()) first.x = first.weights = at::Tensor();
    context->save_for_backward({again ? x : at::Tensor(), again ? weights : at::Tensor(), first.x,
                                first.weights, first.fc1, first.activation});
    return y.rows;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto state = c10::static_intrusive_pointer_cast<SavedDispatch>(
        context->saved_data["dispatch"].toCapsule());
    const variable_list saved = context->get_saved_variables();
    TokenDispatch& tokens = *state->tokens;
    const GroupedMlp& mlp = *state->mlp;
    const GroupedMlp::Values values(*state->mlp, /*backward=*/true);
    const auto gradients = std::make_shared<GroupedMlp::Gradients>(*state->mlp, tokens.rounds());
    const RowsOfRound outputs = tokens.to_experts(grads[0].contiguous(), at::Tensor());
    RowsOfRound inputs;
    if (saved[0].defined()) inputs = tokens.to_experts(saved[0], saved[1]);
    const ExpertRows result = tokens.from_experts([&](int64_t round) {
      const ExpertCounts counts = tokens.counts(round);
      const at::Tensor dy = outputs(round).rows;
      GroupedMlpRows rows{saved[2], saved[3], saved[4], saved[5]};
      if (round > 0 || !rows.x.defined()) {
        const GroupedMlpRows again = rows_of(inputs(round));
        rows.x = again.x;
        rows.weights = again.weights;
      }
      if (round > 0) {
        rows.activation = at::Tensor();
        mlp.forward_fc1(values, counts, rows);
      }
      return mlp.backward(values, dy, counts, rows, gradients);
    });
    return {result.rows, result.weights, at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static GroupedMlpRows rows_of(ExpertRows input) {
    return {std::move(input.rows), std::move(input.weights), {}, {}};
  }
};

}  // namespace

RoutedExperts::RoutedExperts(const RoutedExpertsOptions& options, const ParallelGroups& groups)
    : options_(options), groups_(expert_groups(groups)), mlp_(options.mlp, groups) {
  add("linear_fc1.weight", &mlp_.fc1_weight);
  if (mlp_.has_bias()) add("linear_fc1.bias", &mlp_.fc1_bias);
  add("linear_fc2.weight", &mlp_.fc2_weight);
  if (mlp_.has_bias()) add("linear_fc2.bias", &mlp_.fc2_bias);
}

at::Tensor RoutedExperts::forward(const at::Tensor& x, const at::Tensor& choices,
                                  const at::Tensor& weights, const LayerContext&) {
  check_shape("tokens", x, {-1, options_.mlp.input_size});
  check_shape("choices of experts", choices, {x.size(0), -1});
  check_shape("weights of choices", weights, {x.size(0), choices.size(1)});
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor input = x, weight = weights.to(type);
  if (options_.weights_on_input) {
    MEGATRON_ASSERT(choices.size(1) == 1, "weights on the input of ", choices.size(1), " experts");
    input = (x.to(type) * weight).to(x.scalar_type());
    weight = at::ones(weight.sizes(), weight.options());
  }
  const DispatchOptions dispatch{options_.dispatcher, options_.mlp.num_experts,
                                 options_.rank_capacity_factor};
  const auto tokens = dispatch_tokens(choices, dispatch, groups_);
  return RoutedExpertsFunction::apply(input.contiguous(), weight.contiguous(), anchor(), tokens,
                                      &mlp_);
}

}  // namespace megatron
