#include "megatron/tensor_parallel/overlapped_linear.h"

#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::vector<int64_t> with_first(const at::Tensor& like, int64_t first, int64_t last) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.front() = first;
  shape.back() = last;
  return shape;
}

// Calls multiply(first row, number of rows) for this rank's rows, then, when the others' are there,
// for those before and after.
template <class Multiply>
void own_rows_first(GatheredRows& rows, const ProcessGroup& tp, const Multiply& multiply) {
  const int64_t count = rows.own().size(0), begin = tp.rank() * count;
  multiply(rows.own(), begin, count);
  const at::Tensor& whole = rows.wait();
  const int64_t end = begin + count;
  if (begin > 0) multiply(whole.narrow(0, 0, begin), 0, begin);
  if (end < whole.size(0)) multiply(whole.narrow(0, end, whole.size(0) - end), end, whole.size(0) - end);
}

}  // namespace

GatheredRows::GatheredRows(const at::Tensor& x, const ProcessGroup& tp) : own_(x.contiguous()) {
  whole_ = at::empty(with_first(x, x.size(0) * tp.size(), x.size(-1)), x.options());
  work_ = tp.all_gather(whole_, own_);
}

const at::Tensor& GatheredRows::wait() {
  if (work_) work_->wait();
  work_.reset();
  return whole_;
}

at::Tensor gathered_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                   const ProcessGroup& tp) {
  GatheredRows rows(x, tp);
  at::Tensor y = at::empty(with_first(x, x.size(0) * tp.size(), w.size(0)), w.options());
  own_rows_first(rows, tp, [&](const at::Tensor& part, int64_t begin, int64_t count) {
    linear_forward_into(part, w, bias, y.narrow(0, begin, count));
  });
  return y;
}

at::Tensor gathered_linear_input_grad(GatheredRows& dy, const at::Tensor& w, const ProcessGroup& tp) {
  at::Tensor dx = at::empty(with_first(dy.own(), dy.own().size(0) * tp.size(), w.size(1)), w.options());
  own_rows_first(dy, tp, [&](const at::Tensor& part, int64_t begin, int64_t count) {
    linear_input_grad_into(part, w, dx.narrow(0, begin, count));
  });
  return dx;
}

at::Tensor scattered_linear_forward(const at::Tensor& x, const at::Tensor& w,
                                    const ProcessGroup& tp) {
  const int t = tp.size(), own = tp.rank();
  MEGATRON_ASSERT(x.size(0) % t == 0, "dimension 0 of size ", x.size(0), " over ", t, " ranks");
  const int64_t count = x.size(0) / t;
  std::vector<at::Tensor> parts(t);
  std::vector<std::shared_ptr<Work>> works;
  for (int step = 1; step < t; ++step) {
    const int to = (own + step) % t, from = (own + t - step) % t;
    const at::Tensor product = linear_forward(x.narrow(0, to * count, count), w, {});
    parts[from] = at::empty_like(product);
    std::vector<int64_t> sent(t, 0), received(t, 0);
    sent[to] = received[from] = count;
    works.push_back(tp.all_to_all(parts[from], std::move(received), product, std::move(sent)));
  }
  parts[own] = linear_forward(x.narrow(0, own * count, count), w, {});
  for (const std::shared_ptr<Work>& work : works) work->wait();
  if (t == 2) return parts[0].add_(parts[1]);  // rounded once as well
  const bool wide = w.scalar_type() == at::kDouble || w.scalar_type() == at::kFloat;
  at::Tensor sum = wide ? parts[0] : parts[0].to(at::kFloat);
  for (int rank = 1; rank < t; ++rank) sum.add_(parts[rank]);
  return sum.to(w.scalar_type());
}

}  // namespace megatron
