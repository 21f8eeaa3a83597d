#include "megatron/tensor/rotary.h"

#include "megatron/base/check.h"
#include "megatron/kernels/rotary.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor rotate(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin, bool interleaved,
                  double sign) {
  const at::Tensor in = t.stride(-1) == 1 ? t : t.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options());
  Rotary args;
  args.dtype = to_dtype(in.scalar_type());
  args.sequence = in.size(0);
  args.batch = in.size(1);
  args.heads = in.size(2);
  args.head_dim = in.size(3);
  args.half = cos.size(-1);
  args.interleaved = interleaved;
  args.sign = sign;
  args.in = in.const_data_ptr();
  args.stride_s = in.stride(0);
  args.stride_b = in.stride(1);
  args.stride_n = in.stride(2);
  args.cos = cos.const_data_ptr();
  args.sin = sin.const_data_ptr();
  args.angle_stride_b = cos.dim() == 3 ? args.half : 0;
  args.angle_stride_s = cos.dim() == 3 ? args.half * args.batch : args.half;
  args.out = out.data_ptr();
  launch(
      in, args.sequence * args.batch, args.heads * args.head_dim,
      [&](int64_t begin, int64_t end) { rotary_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(rotary_cuda(args, stream)); });
  return out;
}

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& t, const at::Tensor& cos,
                            const at::Tensor& sin, bool interleaved) {
    context->save_for_backward({cos, sin});
    context->saved_data["interleaved"] = interleaved;
    return rotate(t, cos, sin, interleaved, 1.0);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {rotate(grads[0], saved[0], saved[1], context->saved_data["interleaved"].toBool(), -1.0), {}, {}, {}};
  }
};

}  // namespace

at::Tensor apply_rotary(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
  check_shape("rotary t", t, {-1, -1, -1, -1});
  for (const at::Tensor& angles : {cos, sin}) {
    if (angles.dim() == 3) {
      check_shape("rotary angles", angles, {t.size(0), t.size(1), cos.size(-1)});
    } else {
      check_shape("rotary angles", angles, {t.size(0), cos.size(-1)});
    }
    MEGATRON_ASSERT(angles.scalar_type() == accumulate_type(t) && angles.is_contiguous(),
                    "rotary angles must be contiguous ", c10::toString(accumulate_type(t)));
  }
  MEGATRON_ASSERT(2 * cos.size(-1) <= t.size(3), "rotary angles for ", 2 * cos.size(-1), " features of a head of ",
                  t.size(3));
  return RotaryFunction::apply(t, cos, sin, interleaved);
}

}  // namespace megatron
