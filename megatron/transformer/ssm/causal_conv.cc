#include "megatron/transformer/ssm/causal_conv.h"

#include "megatron/tensor/shape.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/placed.h"
#include "megatron/transformer/ssm/uniform_math.h"

namespace megatron {
namespace {

at::Tensor with_rows_before(const at::Tensor& before, const at::Tensor& u, int64_t rows) {
  return at::cat(
      {before.defined() ? before : at::zeros({rows, u.size(1), u.size(2)}, u.options()), u});
}

// The terms of the convolution: for tap k the rows [s, b, C] that weight[:, 0, k] multiplies.
class ConvTaps {
 public:
  ConvTaps(const at::Tensor& u, const at::Tensor& weight, const ConvBorders& borders)
      : rows_(u.size(0)), width_(weight.size(2)), type_(accumulate_type(u)) {
    check_shape("weight of a causal convolution", weight, {u.size(2), 1, -1});
    if (borders.before.defined())
      check_shape("rows before a causal convolution", borders.before,
                  {width_ - 1, u.size(1), u.size(2)});
    input_ = with_rows_before(borders.before, u, width_ - 1).to(type_);
    weight_ = weight.select(1, 0).to(type_);
    if (!borders.runs.defined()) return;
    check_shape("document runs of a causal convolution", borders.runs, {rows_, u.size(1)});
    runs_ = at::cat({borders.runs_before.defined()
                         ? borders.runs_before
                         : borders.runs.narrow(0, 0, 1).expand({width_ - 1, u.size(1)}),
                     borders.runs});
  }

  at::ScalarType type() const { return type_; }
  int64_t width() const { return width_; }
  const at::Tensor& input() const { return input_; }
  at::Tensor weight(int64_t k) const { return weight_.select(1, k); }
  at::Tensor rows(int64_t k) const { return of_same_document(input_.narrow(0, k, rows_), k); }
  // Zero where the row that tap k sees is of another document.
  at::Tensor of_same_document(const at::Tensor& x, int64_t k) const {
    if (!runs_.defined() || k == width_ - 1) return x;
    const at::Tensor other = runs_.narrow(0, k, rows_).ne(runs_.narrow(0, width_ - 1, rows_));
    return x.masked_fill(other.unsqueeze(2), 0.0);
  }

  // a, before SiLU.
  at::Tensor sum(const at::Tensor& bias) const {
    at::Tensor a = rows(0) * weight(0);
    if (bias.defined()) a += bias.to(type_);
    for (int64_t k = 1; k < width_; ++k) a.addcmul_(rows(k), weight(k));
    return a;
  }

 private:
  int64_t rows_, width_;
  at::ScalarType type_;
  at::Tensor input_, weight_, runs_;
};

}  // namespace

at::Tensor document_runs(const at::Tensor& document_ids) {
  const int64_t s = document_ids.size(1);
  const at::Tensor starts = document_ids.narrow(1, 1, s - 1).ne(document_ids.narrow(1, 0, s - 1));
  const at::Tensor first = at::zeros({document_ids.size(0), 1}, starts.options());
  return at::cat({first, starts}, 1).cumsum(1, at::kLong).t().contiguous();
}

at::Tensor causal_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                       const ConvBorders& borders) {
  const at::NoGradGuard no_grad;
  if (const auto y = ssm_kernels::causal_conv(
          {u, weight, bias, borders.before, borders.runs, borders.runs_before}))
    return *y;
  return uniform_silu(ConvTaps(u, weight, borders).sum(bias)).to(u.scalar_type());
}

CausalConvGrads causal_conv_backward(const at::Tensor& dy, const at::Tensor& u,
                                     const at::Tensor& weight, const at::Tensor& bias,
                                     const ConvBorders& borders, const at::Tensor& du) {
  const at::NoGradGuard no_grad;
  if (const auto grads = ssm_kernels::causal_conv_backward(
          dy, {u, weight, bias, borders.before, borders.runs, borders.runs_before}, du))
    return {placed(grads->u, du), grads->weight, grads->bias, grads->before};
  const ConvTaps taps(u, weight, borders);
  const at::Tensor a = taps.sum(bias), gate = at::sigmoid(a);
  const at::Tensor da = dy.to(taps.type()) * gate * (1.0 + a * (1.0 - gate));
  CausalConvGrads grads;
  at::Tensor dinput = at::zeros_like(taps.input());
  std::vector<at::Tensor> dweight;
  for (int64_t k = 0; k < taps.width(); ++k) {
    dinput.narrow(0, k, u.size(0)).add_(taps.of_same_document(da * taps.weight(k), k));
    dweight.push_back((da * taps.rows(k)).sum(at::IntArrayRef({0, 1})));
  }
  const int64_t rows_before = taps.width() - 1;
  grads.u = placed(dinput.narrow(0, rows_before, u.size(0)).to(u.scalar_type()), du);
  grads.weight = at::stack(dweight, 1).unsqueeze(1);
  if (bias.defined()) grads.bias = da.sum(at::IntArrayRef({0, 1}));
  if (borders.before.defined()) grads.before = dinput.narrow(0, 0, rows_before).to(u.scalar_type());
  return grads;
}

at::Tensor last_conv_rows(const at::Tensor& before, const at::Tensor& u, int64_t width) {
  return with_rows_before(before, u, width - 1).narrow(0, u.size(0), width - 1).contiguous();
}

}  // namespace megatron
