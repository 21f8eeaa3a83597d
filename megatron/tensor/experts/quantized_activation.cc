#include "megatron/tensor/experts/quantized_activation.h"

#include "megatron/base/check.h"
#include "megatron/kernels/fp8/fp8_expert_activation.h"
#include "megatron/tensor/detail/expert_casts.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

QuantizedTensor quantized_weighted_activation(const at::Tensor& x, const at::Tensor& weights,
                                              const ExpertActivation& activation,
                                              const at::Tensor& counts,
                                              const QuantizationOptions& options,
                                              Orientations wanted, const ExpertScales& by) {
  const at::NoGradGuard no_grad;
#ifdef MEGATRON_CUDA
  if (x.is_cuda() && is_gated(activation.kind)) {
    check_shape("input of the activation of experts", x, {-1, -1});
    check_shape("weights of rows", weights, {x.size(0)});
    const at::Tensor in = x.contiguous(), factors = weights.contiguous();
    const int64_t f = in.size(1) / 2;
    check_expert_columns(f, options);
    const at::ScalarType type = options.type(OperandRole::kInput);
    const QuantizedTensor y = empty_expert_codes(in, f, counts.numel(), type, options, wanted);
    const ExpertCastLaunch cast = expert_cast_into(y, type, in, f, counts, counts.numel(), by);
    Fp8ExpertActivation args;
    args.cast = cast.cast;
    args.activation.kind = activation.kind;
    args.activation.dtype = to_dtype(in.scalar_type());
    args.activation.rows = in.size(0);
    args.activation.features = f;
    args.activation.offset = activation.offset;
    if (activation.clamp) args.activation.limit = *activation.clamp;
    args.activation.x = in.const_data_ptr();
    args.activation.weights = factors.const_data_ptr<float>();
    fp8_expert_activation_cuda(args, current_stream(in));
    return y;
  }
#endif
  return quantize_expert_rows(weighted_activation(x, weights, activation), counts,
                              OperandRole::kInput, options, wanted, by);
}

}  // namespace megatron
