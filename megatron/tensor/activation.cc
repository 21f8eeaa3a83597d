#include "megatron/tensor/activation.h"

#include "megatron/base/check.h"
#include "megatron/kernels/activation.h"
#include "megatron/kernels/fp8/fp8_activation.h"
#include "megatron/tensor/detail/fp8_rows.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

ActivationArgs make_args(const at::Tensor& x, Activation activation, double offset,
                         const at::Tensor& out) {
  ActivationArgs args;
  args.kind = activation;
  args.dtype = to_dtype(x.scalar_type());
  args.features = is_gated(activation) ? x.size(-1) / 2 : x.size(-1);
  args.rows = x.numel() / x.size(-1);
  args.offset = offset;
  args.x = x.const_data_ptr();
  args.out = out.data_ptr();
  return args;
}

class ActivationFunction : public torch::autograd::Function<ActivationFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            int64_t activation, double offset) {
    const at::Tensor in = x.contiguous();
    context->save_for_backward({in});
    context->saved_data["activation"] = activation;
    context->saved_data["offset"] = offset;
    return activation_forward(in, static_cast<Activation>(activation), offset);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::Tensor x = context->get_saved_variables()[0];
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    return {activation_backward(grads[0], x, activation, context->saved_data["offset"].toDouble()),
            {},
            {}};
  }
};

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation, double offset,
                              const at::Tensor& amax) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (is_gated(activation)) shape.back() /= 2;
  at::Tensor y = at::empty(shape, x.options());
  ActivationArgs args = make_args(x, activation, offset, y);
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  launch(
      x, args.rows, x.size(-1),
      [&](int64_t begin, int64_t end) { activation_forward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(activation_forward_cuda(args, stream)); });
  return y;
}

at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& x, Activation activation,
                               double offset, const at::Tensor& amax) {
  at::Tensor dx = at::empty_like(x);
  activation_backward_into(dy, x, activation, offset, dx, amax);
  return dx;
}

void activation_backward_into(const at::Tensor& dy, const at::Tensor& x, Activation activation,
                              double offset, at::Tensor dx, const at::Tensor& amax) {
  const at::Tensor grad = dy.contiguous();
  ActivationArgs args = make_args(x, activation, offset, dx);
  args.dy = grad.const_data_ptr();
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  launch(
      x, args.rows, 2 * x.size(-1),
      [&](int64_t begin, int64_t end) { activation_backward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(activation_backward_cuda(args, stream)); });
}

QuantizedTensor quantize_activation(const at::Tensor& x, const at::Tensor& dy,
                                    Activation activation, double offset, at::ScalarType type,
                                    Orientations wanted, const TensorScale& by) {
  const at::NoGradGuard no_grad;
  MEGATRON_ASSERT(is_gated(activation), "quantised output of an activation that is not gated");
  const at::Tensor in = x.contiguous(), grad = dy.defined() ? dy.contiguous() : dy;
  const int64_t r = in.numel() / in.size(-1), c = dy.defined() ? in.size(-1) : in.size(-1) / 2;
  const auto codes = in.options().dtype(type), floats = in.options().dtype(at::kFloat);
  const bool blocks = !by.scale.defined();
  const at::Tensor scale = blocks ? at::Tensor() : at::empty({kFp8ScaleElements}, floats);
  QuantizedTensor out;
  out.rows = {at::empty({r, c}, codes), blocks ? at::empty({c / kFp8Block, r}, floats) : scale,
              blocks ? ScaleLayout::kVector128 : ScaleLayout::kTensor};
  if (wanted.columns)
    out.columns = {at::empty({c, r}, codes), blocks ? at::empty({r / kFp8Block, c}, floats) : scale,
                   out.rows.layout};
  ActivationArgs args = make_args(in, activation, offset, in);
  args.out = nullptr;
  if (dy.defined()) args.dy = grad.const_data_ptr();
  const Fp8Type fp8 = type == at::kFloat8_e5m2 ? Fp8Type::kE5M2 : Fp8Type::kE4M3;
  auto* in_rows = static_cast<uint8_t*>(out.rows.codes.data_ptr());
  auto* in_columns = wanted.columns ? static_cast<uint8_t*>(out.columns.codes.data_ptr()) : nullptr;
  if (blocks) {
    MEGATRON_ASSERT(r % kFp8Block == 0 && args.features % kFp8Block == 0, "FP8 blocks of [", r,
                    ", ", args.features, "]");
    Fp8BlockActivation all;
    all.activation = args;
    all.backward = dy.defined();
    all.cast.dtype = args.dtype;
    all.cast.type = fp8;
    all.cast.rows = r;
    all.cast.columns = c;
    all.cast.in_rows = in_rows;
    all.cast.in_columns = in_columns;
    all.cast.row_scales = out.rows.scale.data_ptr<float>();
    if (wanted.columns) all.cast.column_scales = out.columns.scale.data_ptr<float>();
    launch(
        in, r / kFp8Block, kFp8Block * 2 * in.size(-1),
        [&](int64_t begin, int64_t end) { fp8_block_activation_cpu(all, begin, end); },
        [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_block_activation_cuda(all, stream)); });
    return out;
  }
  Fp8Activation all;
  all.activation = args;
  all.backward = dy.defined();
  all.type = fp8;
  all.given_scale = by.scale.const_data_ptr<float>();
  if (by.new_amax.defined()) all.new_amax = by.new_amax.data_ptr<float>();
  all.scale = scale.data_ptr<float>();
  all.in_rows = in_rows;
  all.in_columns = in_columns;
  launch(
      in, r, 2 * in.size(-1),
      [&](int64_t begin, int64_t end) { fp8_activation_cpu(all, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_activation_cuda(all, stream)); });
  return out;
}

QuantizedMatrix quantize_activation_rows(const at::Tensor& x, Activation activation, double offset,
                                         const at::Tensor& factors) {
  const at::NoGradGuard no_grad;
  MEGATRON_ASSERT(is_gated(activation), "quantised output of an activation that is not gated");
  const at::Tensor in = x.contiguous();
  Fp8Rows args;
  args.of = Fp8RowsOf::kActivation;
  args.activation.kind = activation;
  args.activation.offset = offset;
  if (factors.defined()) args.factors = factors.const_data_ptr<float>();
  return quantize_rows_of(in, args, in.size(-1) / 2);
}

at::Tensor activate(const at::Tensor& x, Activation activation, double offset) {
  MEGATRON_ASSERT(x.dim() >= 1 && x.size(-1) > 0, "activation of a tensor without features");
  MEGATRON_ASSERT(!is_gated(activation) || x.size(-1) % 2 == 0,
                  "gated activation of the odd width ", x.size(-1));
  return ActivationFunction::apply(x, static_cast<int64_t>(activation), offset);
}

}  // namespace megatron
