#include "megatron/transformer/recurrent/gated_scan.h"

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor scan(const at::Tensor& a, const at::Tensor& v, const at::Tensor& first) {
  at::Tensor all = at::empty_like(v);
  at::Tensor state = first.defined() ? first : at::zeros_like(v[0]);
  for (int64_t t = 0; t < v.size(0); ++t) {
    all[t].copy_(a[t] * (state - v[t]) + v[t]);
    state = all[t];
  }
  return all;
}

class GatedScan : public torch::autograd::Function<GatedScan> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const at::Tensor& v) {
    const at::Tensor all = scan(a, v, {});
    context->save_for_backward({a, v, all});
    return all;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &a = saved[0], &v = saved[1], &all = saved[2];
    at::Tensor da = at::empty_like(a), dv = at::empty_like(v);
    at::Tensor later = at::zeros_like(all[0]);  // a_{t+1} ds_{t+1}
    for (int64_t t = v.size(0) - 1; t >= 0; --t) {
      const at::Tensor ds = grads[0][t] + later;
      da[t].copy_(t > 0 ? ds * (all[t - 1] - v[t]) : -ds * v[t]);
      later = a[t] * ds;
      dv[t].copy_(ds - later);
    }
    return {da, dv};
  }
};

}  // namespace

at::Tensor gated_scan(const at::Tensor& a, const at::Tensor& v, const at::Tensor& first) {
  if (first.defined()) return scan(a, v, first);
  return GatedScan::apply(a, v);
}

}  // namespace megatron
