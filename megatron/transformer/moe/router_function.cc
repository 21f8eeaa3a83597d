#include "megatron/transformer/moe/router_function.h"

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SavedRouter : torch::CustomClassHolder {
  RoutingOptions options;
  int64_t sequences = 1;
  std::array<double, kBalanceTerms> coefficients = {};
  std::vector<size_t> losses;  // those that are outputs, behind the weights
  bool has_weights = false;
};

// What the backward reads; results of the pass, which are outputs, are not among it.
struct RouterFunction : torch::autograd::Function<RouterFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& logits,
                               const RoutingOptions* options, const RouterPass* pass,
                               const RouterSums* sums, const RouterLosses* losses) {
    const auto saved = c10::make_intrusive<SavedRouter>();
    saved->options = *options;
    saved->sequences = sums->sequences;
    saved->coefficients = losses->coefficients;
    saved->has_weights = pass->weights.defined();
    variable_list outputs;
    if (saved->has_weights) outputs.push_back(pass->weights);
    for (size_t i = 0; i < kBalanceTerms; ++i) {
      if (!losses->losses[i].defined()) continue;
      saved->losses.push_back(i);
      outputs.push_back(losses->losses[i]);
    }
    context->set_materialize_grads(false);
    context->save_for_backward(
        {logits, pass->choices, sums->padding, losses->shares, losses->of_sequence});
    context->saved_data["router"] = c10::IValue::make_capsule(saved);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved =
        c10::static_intrusive_pointer_cast<SavedRouter>(context->saved_data["router"].toCapsule());
    const variable_list kept = context->get_saved_variables();
    RouterSums sums;
    sums.sequences = saved->sequences;
    sums.padding = kept[2];
    RouterLosses losses;
    losses.shares = kept[3];
    losses.of_sequence = kept[4];
    losses.coefficients = saved->coefficients;
    std::array<at::Tensor, kBalanceTerms> dlosses;
    const size_t first = saved->has_weights ? 1 : 0;
    for (size_t i = 0; i < saved->losses.size(); ++i) dlosses[saved->losses[i]] = grads[first + i];
    const at::Tensor dlogits =
        router_backward(kept[0], saved->options, kept[1],
                        saved->has_weights ? grads[0] : at::Tensor(), sums, losses, dlosses);
    return {dlogits, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

RouterOutputs router_outputs(const at::Tensor& logits, const RoutingOptions& options,
                             const RouterPass& pass, const RouterSums& sums,
                             const RouterLosses& losses) {
  const variable_list all = RouterFunction::apply(logits, &options, &pass, &sums, &losses);
  RouterOutputs outputs;
  size_t next = 0;
  if (pass.weights.defined()) outputs.weights = all[next++];
  for (size_t i = 0; i < kBalanceTerms; ++i)
    if (losses.losses[i].defined()) outputs.losses[i] = all[next++];
  return outputs;
}

}  // namespace megatron
