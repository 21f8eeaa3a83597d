#include "megatron/tensor_parallel/linear_cross_entropy.h"

#include <algorithm>

#include "megatron/nn/functional.h"
#include "megatron/tensor/cross_entropy.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkBytes = int64_t{1} << 30;
constexpr int64_t kChunkMultiple = 128;  // tokens

struct Inputs {
  Parameter* weight;
  at::Tensor targets;    // [n], relative to this rank's first column
  at::Tensor loss_grad;  // [n]
  int64_t valid;
  double z_coeff;
  int64_t chunk;
  const ProcessGroup* tp;
  const ProcessGroup* input_sum;  // group over which the gradient of x is summed
  at::Tensor hits;                // [n] bool; undefined: not wanted
};

struct LinearCrossEntropyFunction : torch::autograd::Function<LinearCrossEntropyFunction> {
  // x [n, h], the rows of all ranks; returns [n].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            const Inputs* inputs) {
    Parameter& parameter = *inputs->weight;
    const AcquiredValue weight(&parameter);
    const at::Tensor input = x.to(weight.value().scalar_type());  // the residual stream may be fp32
    const int64_t rows = input.size(0);
    at::Tensor loss = at::empty({rows}, inputs->loss_grad.options()), dx = at::empty_like(input);
    for (int64_t begin = 0; begin < rows; begin += inputs->chunk) {
      const int64_t count = std::min(inputs->chunk, rows - begin);
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, count); };
      const at::Tensor logits = linear_forward(part(input), weight.value(), {});
      const TokenLosses parts =
          token_losses(logits, part(inputs->targets), inputs->valid, inputs->z_coeff, *inputs->tp);
      part(loss).copy_(parts.loss);
      if (inputs->hits.defined()) part(inputs->hits).copy_(parts.target >= parts.largest);
      const at::Tensor dlogits =
          cross_entropy_backward(logits, part(inputs->targets), parts.lse, part(inputs->loss_grad),
                                 inputs->valid, inputs->z_coeff, /*in_place=*/true);
      linear_input_grad_into(dlogits, weight.value(), part(dx));
      if (!parameter.trainable) continue;
      const GradTarget target = parameter.store->grad_target(parameter);
      linear_weight_grad(dlogits, part(input), target.tensor, target.beta);
    }
    inputs->input_sum->all_reduce(dx)->wait();
    context->saved_data["parameter"] = reinterpret_cast<int64_t>(&parameter);
    context->save_for_backward({dx.to(x.scalar_type())});
    return loss;
  }

  static variable_list backward(AutogradContext* context, variable_list) {
    auto* parameter = reinterpret_cast<Parameter*>(context->saved_data["parameter"].toInt());
    if (parameter->trainable) parameter->store->grad_ready(*parameter);
    return {context->get_saved_variables()[0], at::Tensor(), at::Tensor()};
  }
};

}  // namespace

int64_t cross_entropy_chunk(int64_t tokens, int64_t columns, int64_t element_bytes) {
  const int64_t most =
      std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, columns * element_bytes));
  if (tokens <= most) return std::max<int64_t>(1, tokens);
  const int64_t parts = (tokens + most - 1) / most, equal = (tokens + parts - 1) / parts;
  return (equal + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple;
}

at::Tensor linear_cross_entropy(Parameter& weight, const at::Tensor& x, const at::Tensor& targets,
                                const at::Tensor& loss_grad,
                                const LinearCrossEntropyOptions& options, const ProcessGroup& tp,
                                at::Tensor* hits) {
  static const ProcessGroup self;
  const bool split = options.sequence_parallel && tp.size() > 1;
  const int64_t s = targets.size(0), b = targets.size(1), columns = weight.local_shape[0];
  const at::Tensor whole = split ? gather_from_sequence_parallel_region(x, tp) : x;
  check_shape("linear_cross_entropy x", whole, {s, b, weight.local_shape[1]});
  check_shape("linear_cross_entropy loss_grad", loss_grad, {s, b});
  const at::Tensor ignored = targets.reshape({-1}) < 0;
  Inputs inputs;
  inputs.weight = &weight;
  const int64_t first = tp.rank() * columns;
  inputs.targets = targets.reshape({-1});
  if (first != 0) inputs.targets = at::where(ignored, inputs.targets, inputs.targets - first);
  const at::Tensor none = at::zeros({}, loss_grad.options());
  inputs.loss_grad = at::where(ignored, none, loss_grad.detach().reshape({-1})).contiguous();
  inputs.valid = std::clamp<int64_t>(options.vocab_size - first, 0, columns);
  inputs.z_coeff = options.z_coeff;
  inputs.chunk = options.chunk_tokens > 0
                     ? options.chunk_tokens
                     : cross_entropy_chunk(s * b, columns, whole.element_size());
  inputs.tp = &tp;
  // With sequence parallelism the gather's backward sums dX over the group.
  inputs.input_sum = split ? &self : &tp;
  if (hits != nullptr) {
    inputs.hits = at::empty({s * b}, x.options().dtype(at::kBool));
    *hits = inputs.hits.view({s, b});
  }
  const at::Tensor loss =
      LinearCrossEntropyFunction::apply(whole.reshape({s * b, -1}), anchor(), &inputs);
  return at::where(ignored, none, loss).view({s, b});
}

}  // namespace megatron
