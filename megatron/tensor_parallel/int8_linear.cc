#include "megatron/tensor_parallel/detail/int8_linear.h"

#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tensor_parallel/lora_adapter.h"

namespace megatron {
namespace {

void add_adapters(const LinearState& state, const at::Tensor& x, const at::Tensor& y) {
  if (has_row_adapters(state)) RowAdapters::current()->add_output(*state.weight, x, y);
}

}  // namespace

const Int8Weight* int8_weight(const LinearState& state) {
  auto* store = dynamic_cast<ForwardParameterStore*>(state.weight->store);
  return store != nullptr ? store->int8_weight(*state.weight) : nullptr;
}

at::Tensor int8_column_forward(const at::Tensor& x, const LinearState& state,
                               const Int8Weight& weight) {
  const at::NoGradGuard no_grad;
  const AcquiredValue bias(state.bias);
  at::Tensor input = x;
  if (state.norm != nullptr)
    input = norm_forward(*state.norm, x).y.to(state.weight->value.scalar_type());
  input = gathered(state, input);
  const at::Tensor y = int8_product(input, weight, bias.value(), {});
  add_adapters(state, input, y);
  return of_all_rows(state, y);
}

at::Tensor int8_row_forward(const at::Tensor& x, const at::Tensor& residual,
                            const LinearState& state, const Int8Weight& weight, bool is_activated) {
  const at::NoGradGuard no_grad;
  const AcquiredValue bias(state.bias);
  const at::Tensor input =
      state.input_activation && !is_activated
          ? activation_forward(x, *state.input_activation, state.activation_offset)
          : x;
  const bool alone = state.tp->size() == 1;
  at::Tensor y = int8_product(input, weight, alone ? bias.value() : at::Tensor(),
                              alone ? residual : at::Tensor());
  add_adapters(state, input, y);
  return alone ? y : summed_over_ranks(state, y, bias.value(), residual);
}

}  // namespace megatron
