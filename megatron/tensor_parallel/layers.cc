#include "megatron/tensor_parallel/layers.h"

#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/kernels/sum_parts.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/detail/int8_linear.h"
#include "megatron/tensor_parallel/detail/linear_state.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/tensor_parallel/overlapped_linear.h"

namespace megatron {

void accumulate_weight_grad(Parameter& weight, const at::Tensor& dy,
                            const std::function<at::Tensor()>& x) {
  run_weight_gradient(weight, [dy, x](const GradTarget& target) {
    linear_weight_grad(dy, x(), target.tensor, target.beta);
  });
}

void accumulate_bias_grad(Parameter* bias, const at::Tensor& dy) {
  if (bias == nullptr || !bias->trainable) return;
  const GradTarget target = bias->store->grad_target(*bias);
  bias_grad(dy, target.tensor, target.beta);
  if (const FixedZeros& zeros = bias->zeros; zeros.count > 0)
    target.tensor.view({-1, zeros.period}).narrow(1, zeros.first, zeros.count).zero_();
  bias->store->grad_ready(*bias);
}

bool has_row_adapters(const LinearState& state) {
  const RowAdapters* const rows = RowAdapters::current();
  return rows != nullptr && rows->adapts(*state.weight);
}

at::Tensor gathered(const LinearState& state, const at::Tensor& x) {
  return divides_rows(state) ? all_gather_first_dim(x, *state.tp) : x;
}

std::shared_ptr<Work> sum_over_ranks(const LinearState& state, at::Tensor& x) {
  if (state.tp->size() == 1) return nullptr;
  if (!divides_rows(state)) return state.tp->all_reduce(x);
  if (const DividedRows* rows = DividedRows::current()) x = rows->filled(x);
  const at::Tensor part = empty_rows(x, *state.tp);
  std::shared_ptr<Work> reduction = scatter_rows(x, part, *state.tp, state.mailbox.get());
  x = part;
  return reduction;
}

at::Tensor summed_over_ranks(const LinearState& state, at::Tensor y, const at::Tensor& bias,
                             const at::Tensor& residual, const at::Tensor& factors) {
  if (const auto peers = state.tp->held_peer_collectives();
      peers && !divides_rows(state) && !bias.defined() && residual.defined() &&
      residual.is_contiguous() && residual.scalar_type() == y.scalar_type() &&
      peers->takes_reduction(y) && (!factors.defined() || peers->takes_factors(y, factors))) {
    peers->all_reduce(y, ReduceOp::kSum, residual, factors);
    return y;
  }
  if (factors.defined()) multiply_by_factors(y, factors, {}, {});
  if (const std::shared_ptr<Work> sum = sum_over_ranks(state, y)) sum->wait();
  if (bias.defined()) y.add_(bias);
  return residual.defined() ? y.add_(residual) : y;
}

bool add_norm(const LinearState& state, AroundProduct& around, std::optional<AcquiredValue>& gain) {
  NormParameters* const norm = state.norm;
  if (norm == nullptr) return true;
  if (norm->options.kind != Normalization::kRMSNorm) return false;
  gain.emplace(&norm->weight);
  around.gain = gain->value();
  around.eps = norm->options.eps;
  around.zero_centered = norm->options.zero_centered;
  return true;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Note [Postponed weight gradients] Weight gradients are off the critical path. They are queued and
// run while the next transfer through the mailbox is in flight, or at the end of the backward pass:
// between two exchanges of rows there is not always another product to overlap with. A queued
// gradient keeps its operands alive, one of them in a slot of the mailbox.
void postpone_weight_grad(LinearState& state, const at::Tensor& dy, std::function<at::Tensor()> x) {
  const double flops =
      2.0 * static_cast<double>(dy.numel()) * static_cast<double>(state.weight->local_shape[1]);
  state.mailbox->postpone(flops, [&weight = *state.weight, dy, x = std::move(x)] {
    accumulate_weight_grad(weight, dy, x);
  });
  torch::autograd::Engine::get_default_engine().queue_callback(
      [mailbox = state.mailbox] { mailbox->run_postponed(); });
}

template <class State>
State* saved_state(AutogradContext* context) {
  return reinterpret_cast<State*>(context->saved_data["state"].toInt());
}

// X A^T + b, plus the output of the adapter.
at::Tensor product(const LinearState& state, const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& bias, const at::Tensor& residual = {}) {
  // Of a store that trains, weights may just have been gathered or updated.
  const at::Tensor y =
      linear_forward(x, weight, bias, residual, state.weight->store->only_forward());
  if (state.lora != nullptr) state.lora->add_output(x, y);
  if (const RowAdapters* rows = RowAdapters::current()) rows->add_output(*state.weight, x, y);
  return y;
}

bool is_adapted(const LinearState& state) {
  return state.lora != nullptr || has_row_adapters(state);
}

at::Tensor column_product(const LinearState& state, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
  return of_all_rows(state,
                     divides_rows(state) && !is_adapted(state)
                         ? gathered_linear_forward(x, weight, bias, *state.tp, state.mailbox.get())
                         : product(state, gathered(state, x), weight, bias));
}

// norm(x) A^T + b, with `swiglu` the activation behind it, in one kernel, or, of some rows, in two;
// undefined where none does that.
at::Tensor fused_column_forward(const LinearState& state, const at::Tensor& x,
                                const at::Tensor& weight, const at::Tensor& bias, bool swiglu) {
  if (!state.weight->store->only_forward() || divides_rows(state) || is_adapted(state)) return {};
  if (swiglu && !bias.defined() && is_gated_rows(x, weight))
    return multiply_gated_rows(state.norm ? norm_forward(*state.norm, x).y : x, weight);
  AroundProduct around;
  around.swiglu = swiglu;
  std::optional<AcquiredValue> gain;
  if (!add_norm(state, around, gain)) return {};
  return fused_linear_forward(x, weight, bias, around);
}

// Whether the backward all-gathers the layer's input now, for a weight gradient that is not
// deferred.
bool gathers_input(const LinearState& state) {
  return state.sequence_parallel && state.weight->trainable && !state.weight->store->defers();
}

// Identity. Its backward starts the all-gather of the layer's input.
struct PrefetchInput : torch::autograd::Function<PrefetchInput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& input,
                            LinearState* state) {
    context->saved_data["state"] = reinterpret_cast<int64_t>(state);
    context->save_for_backward({input});
    return x;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    LinearState& state = *saved_state<LinearState>(context);
    const at::Tensor input = context->get_saved_variables()[0];
    if (gathers_input(state))
      state.input_rows = std::make_shared<GatheredRows>(input, *state.tp, state.mailbox.get());
    return {grads[0], at::Tensor(), at::Tensor()};
  }
};

// {Y, X} with Y = norm(X) A^T + b, A's rows being those of this rank.
struct ColumnFunction : torch::autograd::Function<ColumnFunction> {
  // `kept` becomes the rows that are multiplied, if they are saved for the backward.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                               LinearState* state, at::Tensor* kept) {
    const AcquiredValue weight(state->weight), bias(state->bias);
    context->saved_data["state"] = reinterpret_cast<int64_t>(state);
    context->set_materialize_grads(false);  // there may be no residual path
    if (state->norm == nullptr) {
      // The residual stream may be fp32
      const at::Tensor input = x.to(weight.value().scalar_type());
      context->saved_data["type"] = static_cast<int64_t>(x.scalar_type());
      context->save_for_backward({input});
      *kept = input;
      return {column_product(*state, input, weight.value(), bias.value()), x};
    }
    if (const at::Tensor y = fused_column_forward(*state, x, weight.value(), bias.value(), false);
        y.defined())
      return {y, x};
    const NormResult normed = norm_forward(*state->norm, x);
    const at::Tensor y = normed.y.to(weight.value().scalar_type());
    context->save_for_backward(
        {x, normed.mean, normed.rstd, state->recompute_norm ? at::Tensor() : y});
    if (!state->recompute_norm) *kept = y;
    return {column_product(*state, y, weight.value(), bias.value()), x};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    LinearState& state = *saved_state<LinearState>(context);
    const variable_list saved = saved_for(*state.weight, context->get_saved_variables());
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx;
    at::ScalarType type;
    // For the weight gradient, unless deferred: prefetched, or gathered during the product below.
    std::shared_ptr<GatheredRows> input = std::exchange(state.input_rows, nullptr);
    {
      const AcquiredValue weight(state.weight);
      type = weight.value().scalar_type();
      if (!input && gathers_input(state))
        input = std::make_shared<GatheredRows>(linear_input(state, saved, type), *state.tp,
                                               state.mailbox.get());
      dx = linear_input_grad(dy, weight.value());
    }
    at::Tensor inner;  // gradient of the adapter's hidden state, between A and B
    if (state.lora != nullptr) inner = state.lora->add_input_grad(dy, dx);
    // Overlaps with a weight gradient
    const std::shared_ptr<Work> reduction = sum_over_ranks(state, dx);
    const auto whole_input = [&state, saved, type] {
      return gathered(state, linear_input(state, saved, type));
    };
    std::function<at::Tensor()> x = whole_input;
    if (input) x = [input] { return input->wait(); };
    const bool postponed =
        input && input->in_parts() && hides_exchange(*state.mailbox, dx, *state.tp);
    if (postponed) {
      reduction->wait();  // meanwhile runs gradients that other layers postponed
      postpone_weight_grad(state, dy, x);
    } else {
      accumulate_weight_grad(*state.weight, dy, x);
    }
    if (state.lora != nullptr) state.lora->accumulate_grads(dy, inner, whole_input);
    accumulate_bias_grad(state.bias, dy);
    if (reduction && !postponed) reduction->wait();
    const at::Tensor& residual_path_grad = grads[1];  // undefined without a residual path
    if (state.norm != nullptr) {
      dx = norm_backward(*state.norm, dx, saved[0], saved[1], saved[2], residual_path_grad);
    } else {
      dx = dx.to(static_cast<at::ScalarType>(context->saved_data["type"].toInt()));
      if (residual_path_grad.defined()) dx = dx + residual_path_grad;
    }
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor linear_input(LinearState& state, const variable_list& saved,
                                 at::ScalarType type) {
    if (state.norm == nullptr) return saved[0];
    if (saved[3].defined()) return saved[3];
    return norm_apply(*state.norm, saved[0], saved[1], saved[2]).to(type);
  }
};

// Y = sum over ranks of X_r A_r^T, + b, + residual.
struct RowFunction : torch::autograd::Function<RowFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& residual, const at::Tensor&,
                            LinearState* state, bool is_activated) {
    const AcquiredValue weight(state->weight), bias(state->bias);
    context->saved_data["state"] = reinterpret_cast<int64_t>(state);
    context->saved_data["residual"] = residual.has_value();
    const at::Tensor x = is_activated ? input : activated(*state, input);
    const bool recompute = !state->input_activation || state->recompute_activation;
    context->save_for_backward({input, recompute ? at::Tensor() : x});
    if (state->tp->size() == 1)
      return product(*state, x, weight.value(), bias.value(), residual.value_or(at::Tensor()));
    at::Tensor y;
    if (divides_rows(*state) && !is_adapted(*state) && state->tp->size() <= kMaxSumParts) {
      // Served without sequence parallelism, the residual is added to a sum that was rounded.
      const bool together = residual && !bias.value().defined() &&
                            state->tp->size() < kMaxSumParts && !is_batch_invariant();
      y = scattered_linear_forward(x, weight.value(), *state->tp, state->mailbox.get(),
                                   together ? *residual : at::Tensor());
      if (together) return y;
    } else {
      y = product(*state, x, weight.value(), at::Tensor());
      return summed_over_ranks(*state, y, bias.value(), residual.value_or(at::Tensor()));
    }
    if (bias.value().defined()) y.add_(bias.value());
    return residual ? y.add_(*residual) : y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    LinearState& state = *saved_state<LinearState>(context);
    const variable_list saved = saved_for(*state.weight, context->get_saved_variables());
    const at::Tensor input = saved[0];
    // The product also applies the GELU's backward, unless an adapter adds to its result first.
    const bool in_product =
        state.input_activation == Activation::kGeluTanh && state.lora == nullptr;
    const at::Tensor gelu_input = in_product ? input : at::Tensor();
    accumulate_bias_grad(state.bias,
                         grads[0].contiguous());  // a partial sum with sequence_parallel
    at::Tensor dy = grads[0].contiguous(), dx;
    std::shared_ptr<GatheredRows> rows;
    {
      const AcquiredValue weight(state.weight);
      if (state.sequence_parallel) {
        // A deferred weight gradient must not hold memory of the mailbox.
        rows = std::make_shared<GatheredRows>(
            dy, *state.tp, state.weight->store->defers() ? nullptr : state.mailbox.get());
        dx = gathered_linear_input_grad(*rows, weight.value(), *state.tp, gelu_input);
        dy = rows->wait();
      } else {
        dx = linear_input_grad(dy, weight.value(), gelu_input);
      }
    }
    at::Tensor inner;
    if (state.lora != nullptr) inner = state.lora->add_input_grad(dy, dx);
    {
      const at::Tensor x = saved[1].defined() ? saved[1] : activated(state, input);
      if (rows && rows->in_parts() && state.weight->trainable) {
        postpone_weight_grad(state, dy, [rows, x] { return x; });
      } else {
        accumulate_weight_grad(*state.weight, dy, [x] { return x; });
      }
      if (state.lora != nullptr) state.lora->accumulate_grads(dy, inner, [x] { return x; });
    }
    if (state.input_activation && !in_product)
      dx = activation_backward(dx, input, *state.input_activation, state.activation_offset);
    return {dx, residual_grad(context, grads[0]), at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor activated(const LinearState& state, const at::Tensor& input) {
    return state.input_activation
               ? activate(input, *state.input_activation, state.activation_offset)
               : input;
  }
};

// With delayed scaling, the weight's store keeps the scales.
void quantize_products(const QuantizationOptions& options, LinearState& state) {
  state.quantization = options;
  state.weight->quantization = options.recipe;
  if (options.recipe == QuantizationRecipe::kDelayed)
    state.weight->delayed_scaling = options.delayed;
}

int64_t part_of(const std::string& name, const char* what, int64_t size, int ranks) {
  MEGATRON_CHECK(size % ranks == 0, name, ": ", what, " ", size, " is not divisible by ", ranks,
                 " tensor-parallel ranks");
  return size / ranks;
}

}  // namespace

struct ColumnParallelLinear::Impl {
  Parameter weight, bias;
  std::unique_ptr<NormParameters> norm;
  std::unique_ptr<LoraAdapter> lora;
  LinearState state;
};

ColumnParallelLinear::ColumnParallelLinear(std::string name, int64_t input_size,
                                           int64_t output_size, const LinearOptions& options,
                                           const ParallelGroups& groups)
    : impl_(std::make_unique<Impl>()) {
  const ProcessGroup& tp = options.divided ? groups.tp : groups.group({});
  const int ranks = tp.size();
  const std::vector<int64_t> parts =
      options.parts.empty() ? std::vector<int64_t>{output_size} : options.parts;
  for (int64_t part : parts) part_of(name, "output size", part, ranks);
  if (options.input_norm) {
    NormOptions norm = options.norm;
    norm.partial_over_tensor = options.sequence_parallel;
    impl_->norm = std::make_unique<NormParameters>(input_size, norm);
    add("layer_norm_weight", &impl_->norm->weight);
    if (Parameter* bias = impl_->norm->bias_or_null()) add("layer_norm_bias", bias);
  }
  impl_->weight.local_shape = {output_size / ranks, input_size};
  impl_->weight.global_shape = {output_size, input_size};
  impl_->weight.init = options.init;
  impl_->weight.role = options.role;
  impl_->bias.local_shape = {output_size / ranks};
  impl_->bias.global_shape = {output_size};
  impl_->bias.role = ParameterRole::kBias;
  impl_->bias.zeros = options.bias_zeros;
  for (Parameter* parameter : {&impl_->weight, &impl_->bias}) {
    if (options.divided) parameter->placement.shards = {{0, Axis::kTensor, parts}};
    if (!options.divided && options.sequence_parallel)
      parameter->placement.partial_grad.insert(Axis::kTensor);
  }
  add("weight", &impl_->weight);
  if (options.bias) add("bias", &impl_->bias);
  impl_->state = {&impl_->weight,
                  options.bias ? &impl_->bias : nullptr,
                  impl_->norm.get(),
                  &tp,
                  options.sequence_parallel && ranks > 1,
                  options.recompute_norm};
  impl_->state.mailbox = tp.mailbox();
  quantize_products(options.quantization, impl_->state);
  if (options.lora.rank == 0) return;
  impl_->lora = std::make_unique<LoraAdapter>(impl_->weight, options.lora, groups);
  impl_->state.lora = impl_->lora.get();
  add("lora_A.weight", &impl_->lora->a);
  add("lora_B.weight", &impl_->lora->b);
}

ColumnParallelLinear::ColumnParallelLinear(Parameter& weight, bool sequence_parallel,
                                           const ParallelGroups& groups)
    : impl_(std::make_unique<Impl>()) {
  impl_->state.weight = &weight;
  impl_->state.tp = &groups.tp;
  impl_->state.sequence_parallel = sequence_parallel && groups.tp.size() > 1;
  impl_->state.mailbox = groups.tp.mailbox();
}

ColumnParallelLinear::~ColumnParallelLinear() = default;

at::Tensor ColumnParallelLinear::forward(const at::Tensor& x) {
  return forward_with_residual(x).output;
}

SublayerOutput ColumnParallelLinear::forward_with_residual(const at::Tensor& x, at::Tensor* input) {
  if (const Int8Weight* weight = int8_weight(impl_->state))
    return {int8_column_forward(x, impl_->state, *weight), x};
  if (impl_->state.quantization.enabled()) {
    const variable_list both = quantized_column_forward(x, impl_->state);
    return {both[0], both[1]};
  }
  at::Tensor kept;
  const variable_list both = ColumnFunction::apply(x.contiguous(), anchor(), &impl_->state, &kept);
  if (input != nullptr) *input = kept;
  return {both[0], both[1]};
}

std::optional<SublayerOutput> ColumnParallelLinear::forward_swiglu(const at::Tensor& x) {
  if (!impl_->state.weight->store->only_forward() || int8_weight(impl_->state) != nullptr)
    return std::nullopt;
  const at::NoGradGuard no_grad;
  if (impl_->state.quantization.enabled()) {
    const at::Tensor y = quantized_few_rows(x.contiguous(), {}, impl_->state, /*swiglu=*/true);
    return y.defined() ? std::optional(SublayerOutput{y, x}) : std::nullopt;
  }
  const AcquiredValue weight(impl_->state.weight), bias(impl_->state.bias);
  const at::Tensor y =
      fused_column_forward(impl_->state, x.contiguous(), weight.value(), bias.value(), true);
  if (!y.defined()) return std::nullopt;
  return SublayerOutput{y, x};
}

at::Tensor ColumnParallelLinear::prefetch_input_in_backward(const at::Tensor& x,
                                                            const at::Tensor& input) {
  const LinearState& state = impl_->state;
  if (!input.defined() || !state.sequence_parallel || !state.mailbox || !state.mailbox->fits(input))
    return x;
  return PrefetchInput::apply(x, input, &impl_->state);
}

at::Tensor ColumnParallelLinear::with_adapter(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  return impl_->lora ? impl_->lora->added_to(weight) : weight;
}

at::Tensor ColumnParallelLinear::normed(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  if (impl_->state.norm == nullptr) return x;
  const AcquiredValue weight(impl_->state.weight);
  return norm_forward(*impl_->state.norm, x).y.to(weight.value().scalar_type());
}

Parameter& ColumnParallelLinear::weight() { return *impl_->state.weight; }

struct RowParallelLinear::Impl {
  Parameter weight, bias;
  std::unique_ptr<LoraAdapter> lora;
  LinearState state;
};

RowParallelLinear::RowParallelLinear(std::string name, int64_t input_size, int64_t output_size,
                                     const LinearOptions& options, const ParallelGroups& groups)
    : impl_(std::make_unique<Impl>()) {
  const int ranks = groups.tp.size();
  impl_->weight.local_shape = {output_size, part_of(name, "input size", input_size, ranks)};
  impl_->weight.global_shape = {output_size, input_size};
  impl_->weight.init = options.init;
  impl_->weight.placement.shards = {{1, Axis::kTensor, {}}};
  impl_->bias.local_shape = impl_->bias.global_shape = {output_size};
  impl_->bias.role = ParameterRole::kBias;
  if (options.sequence_parallel) impl_->bias.placement.partial_grad.insert(Axis::kTensor);
  add("weight", &impl_->weight);
  if (options.bias) add("bias", &impl_->bias);
  impl_->state = {&impl_->weight,
                  options.bias ? &impl_->bias : nullptr,
                  nullptr,
                  &groups.tp,
                  options.sequence_parallel && ranks > 1,
                  false,
                  options.input_activation,
                  options.activation_offset,
                  options.recompute_activation};
  if (options.input_from != nullptr) {
    impl_->state.input_from = &options.input_from->impl_->state;
    impl_->state.input_from->output_to = &impl_->state;
  }
  impl_->state.mailbox = groups.tp.mailbox();
  quantize_products(options.quantization, impl_->state);
  if (options.lora.rank == 0) return;
  impl_->lora = std::make_unique<LoraAdapter>(impl_->weight, options.lora, groups);
  impl_->state.lora = impl_->lora.get();
  add("lora_A.weight", &impl_->lora->a);
  add("lora_B.weight", &impl_->lora->b);
}

RowParallelLinear::~RowParallelLinear() = default;

at::Tensor RowParallelLinear::forward(at::Tensor x, const at::Tensor& residual) {
  const LinearState& state = impl_->state;
  if (const Int8Weight* weight = int8_weight(state))
    return int8_row_forward(x, residual, state, *weight, /*is_activated=*/false);
  if (state.quantization.enabled())
    return quantized_row_forward(x, residual, impl_->state, /*is_activated=*/false);
  x = x.contiguous();
  // Without autograd the input of the activation can be freed at once.
  const bool activated = state.input_activation && !at::GradMode::is_enabled();
  if (activated) x = activation_forward(x, *state.input_activation, state.activation_offset);
  return RowFunction::apply(x, optional_residual(residual), anchor(), &impl_->state, activated);
}

at::Tensor RowParallelLinear::forward_activated(const at::Tensor& x, const at::Tensor& residual) {
  if (const Int8Weight* weight = int8_weight(impl_->state))
    return int8_row_forward(x, residual, impl_->state, *weight, /*is_activated=*/true);
  if (impl_->state.quantization.enabled())
    return quantized_row_forward(x, residual, impl_->state, /*is_activated=*/true);
  return RowFunction::apply(x.contiguous(), optional_residual(residual), anchor(), &impl_->state,
                            /*is_activated=*/true);
}

}  // namespace megatron
