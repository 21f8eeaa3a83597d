#include "megatron/transformer/moe/routed_experts.h"

#include <torch/csrc/autograd/engine.h>

#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One pass through the experts, which two nodes of the graph share.
struct ExpertsPass {
  std::shared_ptr<TokenDispatch> tokens;
  GroupedMlp* mlp = nullptr;
  std::shared_ptr<PeerMailbox> mailbox;  // null with one rank
  bool early = false;
  RowsOfRound inputs;   // forward: rows on their way since begin()
  RowsOfRound outputs;  // backward: gradients of outputs on their way
  const void *fc1_input = nullptr, *fc1_output = nullptr;  // of what is saved
  variable_list saved;  // backward: what the end of the forward saved
};

namespace {

using PassPointer = std::shared_ptr<ExpertsPass>;

struct PassHolder : torch::CustomClassHolder {
  explicit PassHolder(PassPointer pass) : pass(std::move(pass)) {}
  PassPointer pass;
};

void keep_pass(AutogradContext* context, const PassPointer& pass) {
  context->saved_data["pass"] = c10::IValue::make_capsule(c10::make_intrusive<PassHolder>(pass));
}
PassPointer pass_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<PassHolder>(context->saved_data["pass"].toCapsule())
      ->pass;
}

GroupedMlpRows rows_of(ExpertRows input) {
  GroupedMlpRows rows;
  rows.x = std::move(input.rows);
  rows.weights = std::move(input.weights);
  return rows;
}

// Note [Weight gradients of experts] Those of FC2 are computed while the gradients of rows travel
// back to their tokens, those of FC1 under the next exchange of gradients, in the layer of experts
// before, or at the end of the backward. Schedules that take weight gradients apart get both.
void postpone(const std::shared_ptr<PeerMailbox>& mailbox, std::function<void()> gradients) {
  mailbox->postpone(/*flops=*/0, std::move(gradients));
  torch::autograd::Engine::get_default_engine().queue_callback(
      [mailbox] { mailbox->run_postponed(); });
}

// The experts' backward. Its output stands for the tokens: what is computed of them comes after it
// in the graph, and their gradient is that of the outputs.
struct BeginExperts : torch::autograd::Function<BeginExperts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weights, const at::Tensor&, const PassPointer& pass) {
    keep_pass(context, pass);
    if (pass->early) pass->inputs = pass->tokens->to_experts(x, weights, /*now=*/true);
    return x;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const PassPointer pass = pass_of(context);
    const variable_list saved = std::exchange(pass->saved, {});
    TokenDispatch& tokens = *pass->tokens;
    const GroupedMlp& mlp = *pass->mlp;
    const GroupedMlp::Values values(*pass->mlp, /*backward=*/true);
    const auto gradients = std::make_shared<GroupedMlp::Gradients>(*pass->mlp, tokens.rounds());
    const std::shared_ptr<PeerMailbox> mailbox = tokens.communicates() ? pass->mailbox : nullptr;
    RowsOfRound outputs = std::exchange(pass->outputs, nullptr);
    if (!outputs)
      outputs = tokens.to_experts(grads[0].contiguous(), at::Tensor(), /*now=*/mailbox != nullptr);
    if (mailbox) mailbox->run_postponed();
    RowsOfRound inputs;
    if (saved[0].defined()) inputs = tokens.to_experts(saved[0], saved[1], /*now=*/false);
    const auto run_round = [&](int64_t round) {
      const ExpertCounts counts = tokens.counts(round);
      const at::Tensor dy = outputs(round).rows;
      GroupedMlpRows rows = GroupedMlpRows::of({saved.begin() + 2, saved.end()});
      if (round > 0 || !rows.x.defined()) {
        const GroupedMlpRows again = rows_of(inputs(round));
        rows.x = again.x;
        rows.weights = again.weights;
      }
      if (round > 0) {
        rows.activation = {};
        mlp.forward_fc1(values, counts, rows);
      }
      GroupedMlp::Backward result = mlp.backward(values, dy, counts, rows, gradients);
      if (mailbox && round + 1 == tokens.rounds() && !pass->mlp->defers_gradients()) {
        postpone(mailbox, std::move(result.fc1));
      } else {
        result.rows.meanwhile = [fc2 = std::move(result.rows.meanwhile),
                                 fc1 = std::move(result.fc1)] {
          fc2();
          fc1();
        };
      }
      return std::move(result.rows);
    };
    const ExpertRows result = tokens.from_experts(run_round, /*base=*/at::Tensor());
    return {result.rows, result.weights, at::Tensor(), at::Tensor()};
  }
};

// The experts' forward. Saved: x and weights of the tokens, where a round is exchanged again or
// nothing was exchanged; and of the first round what GroupedMlp left.
struct EndExperts : torch::autograd::Function<EndExperts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& base, const at::Tensor& weights,
                            const PassPointer& pass) {
    keep_pass(context, pass);
    context->saved_data["base"] = base.has_value();
    TokenDispatch& tokens = *pass->tokens;
    const GroupedMlp::Values values(*pass->mlp, /*backward=*/false);
    RowsOfRound inputs = std::exchange(pass->inputs, nullptr);
    if (!inputs) inputs = tokens.to_experts(x, weights, /*now=*/false);
    GroupedMlpRows first;
    const auto run_round = [&](int64_t round) {
      GroupedMlpRows rows = rows_of(inputs(round));
      const at::Tensor output = pass->mlp->forward(values, tokens.counts(round), rows);
      if (round == 0) first = std::move(rows);
      return ExpertRows{output, {}, {}};
    };
    const ExpertRows y = tokens.from_experts(run_round, base.value_or(at::Tensor()));
    const bool again = tokens.rounds() > 1 || !tokens.communicates();
    if (!tokens.communicates()) first.x = first.weights = at::Tensor();
    pass->fc1_input = (first.x.defined() ? first.x : x).const_data_ptr();
    pass->fc1_output = first.fc1.const_data_ptr();
    variable_list saved = {again ? x : at::Tensor(), again ? weights : at::Tensor()};
    for (at::Tensor& tensor : first.tensors()) saved.push_back(std::move(tensor));
    context->save_for_backward(std::move(saved));
    return y.rows;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const PassPointer pass = pass_of(context);
    pass->saved = context->get_saved_variables();
    for (at::Tensor& saved : pass->saved)
      if (saved.defined()) saved = saved.variable_data();
    const at::Tensor dy = grads[0].contiguous();
    if (pass->early) pass->outputs = pass->tokens->to_experts(dy, at::Tensor(), /*now=*/true);
    return {dy, context->saved_data["base"].toBool() ? dy : at::Tensor(), at::Tensor(),
            at::Tensor()};
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

RoutedExperts::Pass RoutedExperts::begin(const at::Tensor& x, const Routing& routing) {
  at::Tensor choices = routing.choices;
  const int64_t k = choices.size(-1), experts = options_.mlp.num_experts;
  check_shape("tokens", x, {-1, options_.mlp.input_size});
  check_shape("choices of experts", choices, {x.size(0), -1});
  check_shape("weights of choices", routing.weights, {x.size(0), k});
  if (routing.kept.defined()) choices = choices.masked_fill(routing.kept.logical_not(), -1);
  const at::ScalarType type = accumulate_type(x);
  at::Tensor input = x, weights = routing.weights.to(type);
  if (options_.weights_on_input) {
    MEGATRON_ASSERT(k == 1, "weights on the input of ", k, " experts");
    input = (x.to(type) * weights).to(x.scalar_type());
    weights = at::ones(weights.sizes(), weights.options());
  }
  DispatchOptions dispatch{options_.dispatcher, experts, options_.rank_capacity_factor};
  dispatch.dropless = !routing.kept.defined() && !routing.padding.defined();
  if (routing.padding.defined()) {
    check_shape("rows that fill experts", routing.padding, {x.size(0), experts});
    dispatch.padded = true;
    dispatch.capacity = routing.capacity;
    dispatch.topk = k;
    const at::Tensor filled =
        at::where(routing.padding, at::arange(experts, choices.options()), -1).to(at::kInt);
    choices = at::cat({choices, filled}, 1);
    weights = at::cat({weights, at::zeros(filled.sizes(), weights.options())}, 1);
  }
  const auto state = std::make_shared<ExpertsPass>();
  state->tokens = dispatch_tokens(choices, dispatch, groups_);
  state->mlp = &mlp_;
  state->mailbox = groups_.mailbox;
  state->early = options_.exchange_early && state->tokens->communicates();
  Pass pass;
  pass.weights_ = weights.contiguous();
  pass.tokens_ = BeginExperts::apply(input.contiguous(), pass.weights_, anchor(), state);
  pass.state_ = state;
  return pass;
}

at::Tensor RoutedExperts::end(Pass pass, const at::Tensor& base, OffloadedPass* offload) {
  const OffloadScope scope(offload, [&](const at::Tensor& saved) {
    const void* data = saved.const_data_ptr();
    return options_.offloads(data == pass.state_->fc1_input    ? "expert_fc1"
                             : data == pass.state_->fc1_output ? "moe_act"
                                                               : "moe_router");
  });
  return EndExperts::apply(pass.tokens_,
                           base.defined() ? std::optional<at::Tensor>(base) : std::nullopt,
                           pass.weights_.detach(), pass.state_);
}

}  // namespace megatron
