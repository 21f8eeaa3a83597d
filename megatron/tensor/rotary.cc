#include "megatron/tensor/rotary.h"

#include "megatron/base/check.h"
#include "megatron/kernels/rotary.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// out = rotated t; `out` may be t.
void rotate_into(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin,
                 bool interleaved, double sign, const at::Tensor& out) {
  Rotary args;
  args.dtype = to_dtype(t.scalar_type());
  args.sequence = t.size(0);
  args.batch = t.size(1);
  args.heads = t.size(2);
  args.head_dim = t.size(3);
  args.half = cos.size(-1);
  args.interleaved = interleaved;
  args.sign = sign;
  args.in = t.const_data_ptr();
  args.stride_s = t.stride(0);
  args.stride_b = t.stride(1);
  args.stride_n = t.stride(2);
  args.cos = cos.const_data_ptr();
  args.sin = sin.const_data_ptr();
  if (cos.dim() == 3) {
    args.angle_stride_b = args.half;
    args.angle_stride_s = args.half * cos.size(1);
    args.batch_per_angle = args.batch / cos.size(1);
  } else {
    args.angle_stride_s = args.half;
  }
  args.out = out.data_ptr();
  args.out_stride_s = out.stride(0);
  args.out_stride_b = out.stride(1);
  args.out_stride_n = out.stride(2);
  launch(
      t, args.sequence * args.batch, args.heads * args.head_dim,
      [&](int64_t begin, int64_t end) { rotary_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(rotary_cuda(args, stream)); });
}

at::Tensor rotate(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin,
                  bool interleaved, double sign) {
  const at::Tensor in = t.stride(-1) == 1 ? t : t.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options());
  rotate_into(in, cos, sin, interleaved, sign, out);
  return out;
}

// The angles are shared by all, or given per sample, of `batch` samples.
void check_angles(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin,
                  int64_t batch) {
  for (const at::Tensor& angles : {cos, sin}) {
    if (angles.dim() == 3) {
      check_shape("rotary angles", angles, {t.size(0), batch, cos.size(-1)});
    } else {
      check_shape("rotary angles", angles, {t.size(0), cos.size(-1)});
    }
    MEGATRON_ASSERT(angles.scalar_type() == accumulate_type(t) && angles.is_contiguous(),
                    "rotary angles must be contiguous ", c10::toString(accumulate_type(t)));
  }
  MEGATRON_ASSERT(2 * cos.size(-1) <= t.size(3), "rotary angles for ", 2 * cos.size(-1),
                  " features of a head of ", t.size(3));
}

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& t,
                            const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
    context->save_for_backward({cos, sin});
    context->saved_data["interleaved"] = interleaved;
    return rotate(t, cos, sin, interleaved, 1.0);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {rotate(grads[0], saved[0], saved[1], context->saved_data["interleaved"].toBool(), -1.0),
            {},
            {},
            {}};
  }
};

}  // namespace

at::Tensor apply_rotary(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved) {
  check_shape("rotary t", t, {-1, -1, -1, -1});
  check_angles(t, cos, sin, t.size(1));
  return RotaryFunction::apply(t, cos, sin, interleaved);
}

void rotate_(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin, bool interleaved,
             double sign) {
  check_shape("rotary t", t, {-1, -1, -1, -1});
  const int64_t samples = cos.dim() == 3 ? cos.size(1) : 1;
  MEGATRON_ASSERT(t.stride(-1) == 1 && t.size(1) % samples == 0, "rotary in place of ", t.size(1),
                  " rows for ", samples, " samples");
  check_angles(t, cos, sin, samples);
  rotate_into(t, cos, sin, interleaved, sign, t);
}

}  // namespace megatron
