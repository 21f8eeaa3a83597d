#include "megatron/tensor_parallel/overlapped_linear.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/sum_parts.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/divided_rows.h"

namespace megatron {
namespace {

std::vector<int64_t> with_first(const at::Tensor& like, int64_t first, int64_t last) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = last;
  shape.front() = first;  // for a vector as well
  return shape;
}

// Output columns of a product that take as long to compute as one row of its input to copy: on GPUs
// 700 TFLOP/s of bf16 over 370 GB/s between two H200s. Between threads on a CPU, where nothing
// overlaps, a number among the widths of small models, which then take every path of large ones.
int64_t columns_of_copy(const at::Tensor& rows) { return rows.is_cpu() ? 32 : 1900; }

// Calls multiply(rows, first row, number of rows) for this rank's rows, then for the others'. Rows
// that arrive rank by rank are multiplied as they arrive, unless this rank's product alone takes as
// long as the transfer of all others.
template <class Multiply>
void own_rows_first(GatheredRows& rows, const ProcessGroup& tp, int64_t columns,
                    const Multiply& multiply) {
  const int t = tp.size(), own = tp.rank();
  const int64_t count = rows.own().size(0), begin = own * count;
  if (rows.hidden()) return multiply(rows.wait(), 0, count * t);
  multiply(rows.own(), begin, count);
  if (rows.in_parts() && columns < columns_of_copy(rows.own()) * (t - 1)) {
    for (int step = 1; step < t; ++step) {
      const int from = (own + t - step) % t;
      multiply(rows.wait(from, 1), from * count, count);
    }
    return;
  }
  if (own > 0) multiply(rows.wait(0, own), 0, begin);
  if (own + 1 < t) multiply(rows.wait(own + 1, t - own - 1), begin + count, (t - own - 1) * count);
}

}  // namespace

bool hides_exchange(const PeerMailbox& mailbox, const at::Tensor& part, const ProcessGroup& tp) {
  return mailbox.postponed_flops() >=
         2.0 * static_cast<double>(columns_of_copy(part) * (tp.size() - 1)) *
             static_cast<double>(part.numel());
}

GatheredRows::GatheredRows(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox* mailbox,
                           bool with_own)
    : tp_(tp), mailbox_(mailbox), with_own_(with_own), own_(x.contiguous()) {
  if (mailbox != nullptr && mailbox->fits(own_)) {
    exchange_.emplace(*mailbox, own_);
    for (int step = 1; step <= tp.size() - (with_own ? 0 : 1); ++step)
      exchange_->post((tp.rank() + step) % tp.size(), own_);
    return;
  }
  whole_ = at::empty(with_first(x, x.size(0) * tp.size(), x.size(-1)), x.options());
  work_ = tp.all_gather(whole_, own_);
}

bool GatheredRows::hidden() const {
  return exchange_ && with_own_ && hides_exchange(*mailbox_, own_, tp_);
}

at::Tensor GatheredRows::wait(int first_rank, int count) {
  if (exchange_) return exchange_->parts(first_rank, count);
  if (work_) work_->wait();
  work_.reset();
  return whole_.narrow(0, first_rank * own_.size(0), count * own_.size(0));
}

ScatteredRows::ScatteredRows(const at::Tensor& rows, const ProcessGroup& tp, PeerMailbox* mailbox)
    : tp_(tp), parts_(tp.size()) {
  if (mailbox != nullptr && mailbox->fits(rows)) exchange_.emplace(*mailbox, rows);
}

void ScatteredRows::send(int to, const at::Tensor& rows) {
  if (exchange_) return exchange_->post(to, rows);
  const int t = tp_.size(), own = tp_.rank(), from = (2 * own + t - to) % t;
  parts_[from] = at::empty_like(rows);
  std::vector<int64_t> sent(t, 0), received(t, 0);
  sent[to] = received[from] = rows.size(0);
  works_.push_back(tp_.all_to_all(parts_[from], std::move(received), rows, std::move(sent)));
}

void ScatteredRows::finish(const at::Tensor& own, const at::Tensor& sum, const at::Tensor& addend) {
  for (const std::shared_ptr<Work>& work : works_) work->wait();
  for (int rank = 0; exchange_ && rank < tp_.size(); ++rank)
    if (rank != tp_.rank()) parts_[rank] = exchange_->part(rank);
  parts_[tp_.rank()] = own;
  if (addend.defined()) parts_.push_back(addend.contiguous());
  for (at::Tensor& part : parts_) part = part.view({-1});
  sum_parts(parts_, sum.view({-1}), /*accumulate=*/false);
  if (exchange_) exchange_->close();
}

namespace {

class ScatterWork final : public Work {
 public:
  ScatterWork(const at::Tensor& x, const at::Tensor& part, const ProcessGroup& tp,
              PeerMailbox* mailbox)
      : rows_(part, tp, mailbox), part_(part) {
    const int t = tp.size(), own = tp.rank();
    const std::vector<at::Tensor> summands = x.chunk(t);
    own_ = summands[own];
    for (int step = 1; step < t; ++step) rows_.send((own + step) % t, summands[(own + step) % t]);
  }
  void wait() override {
    if (own_.defined()) rows_.finish(own_, part_);
    own_.reset();
  }

 private:
  ScatteredRows rows_;
  at::Tensor own_, part_;
};

}  // namespace

std::shared_ptr<Work> scatter_rows(const at::Tensor& x, const at::Tensor& part,
                                   const ProcessGroup& tp, PeerMailbox* mailbox) {
  if (mailbox != nullptr && mailbox->fits(part))
    return std::make_shared<ScatterWork>(x, part, tp, mailbox);
  return tp.reduce_scatter(part, x);
}

at::Tensor gathered_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                   const ProcessGroup& tp, PeerMailbox* mailbox) {
  GatheredRows rows(x, tp, mailbox, /*with_own=*/false);
  at::Tensor y = at::empty(with_first(x, x.size(0) * tp.size(), w.size(0)), w.options());
  own_rows_first(rows, tp, w.size(0), [&](const at::Tensor& part, int64_t begin, int64_t count) {
    linear_forward_into(part, w, bias, y.narrow(0, begin, count));
  });
  return y;
}

at::Tensor gathered_linear_input_grad(GatheredRows& dy, const at::Tensor& w, const ProcessGroup& tp,
                                      const at::Tensor& gelu_input) {
  at::Tensor dx =
      at::empty(with_first(dy.own(), dy.own().size(0) * tp.size(), w.size(1)), w.options());
  own_rows_first(dy, tp, w.size(1), [&](const at::Tensor& part, int64_t begin, int64_t count) {
    const at::Tensor before =
        gelu_input.defined() ? gelu_input.narrow(0, begin, count) : gelu_input;
    linear_input_grad_into(part, w, dx.narrow(0, begin, count), before);
  });
  return dx;
}

at::Tensor gathered_quantized_forward(const QuantizedMatrix& x, const QuantizedMatrix& w,
                                      at::ScalarType type, const at::Tensor& bias,
                                      const ProcessGroup& tp, PeerMailbox* mailbox) {
  MEGATRON_ASSERT(x.layout == ScaleLayout::kRow, "an exchange of rows without scales of their own");
  // Scales first: their few bytes would wait behind the codes.
  GatheredRows scales(x.scale, tp, mailbox, /*with_own=*/false);
  GatheredRows codes(x.codes.view(at::kByte), tp, mailbox, /*with_own=*/false);
  const int64_t rows = x.codes.size(0);
  const at::Tensor y =
      at::empty({rows * tp.size(), w.codes.size(0)}, x.codes.options().dtype(type));
  own_rows_first(
      codes, tp, w.codes.size(0), [&](const at::Tensor& part, int64_t begin, int64_t count) {
        const bool own = count == rows && begin == tp.rank() * rows;
        const at::Tensor scale =
            own ? x.scale
                : scales.wait(static_cast<int>(begin / rows), static_cast<int>(count / rows));
        quantized_product_out({part.view(x.codes.scalar_type()), scale, x.layout}, w,
                              y.narrow(0, begin, count), bias, /*fast=*/true);
      });
  return y;
}

namespace {

// Reduce-scatter of a product of `shape`, [s, ..., n], which multiply(first row, rows of it, place)
// writes in parts. The last ranks may have fewer rows than the others: zeros are behind them.
template <class Multiply>
at::Tensor scattered_product(std::vector<int64_t> shape, const at::TensorOptions& options,
                             const ProcessGroup& tp, PeerMailbox* mailbox, const at::Tensor& addend,
                             const Multiply& multiply) {
  const int t = tp.size(), own = tp.rank();
  const int64_t all = shape.front();
  const DividedRows* const divided = DividedRows::current();
  MEGATRON_ASSERT(divided != nullptr || all % t == 0, "dimension 0 of size ", all, " over ", t,
                  " ranks");
  const int64_t count = shape.front() = divided != nullptr ? divided->count() : all / t;
  std::optional<ScatteredRows> rows;
  at::Tensor product;
  for (int step = 1; step <= t; ++step) {
    const int to = (own + step) % t;
    const int64_t begin = to * count, some = std::clamp<int64_t>(all - begin, 0, count);
    product = at::empty(shape, options);
    if (some > 0) multiply(begin, some, product.narrow(0, 0, some));
    if (some < count) product.narrow(0, some, count - some).zero_();
    if (!rows) rows.emplace(product, tp, mailbox);
    if (to != own) rows->send(to, product);
  }
  rows->finish(product, product, addend);
  return product;
}

}  // namespace

at::Tensor scattered_linear_forward(const at::Tensor& x, const at::Tensor& w,
                                    const ProcessGroup& tp, PeerMailbox* mailbox,
                                    const at::Tensor& addend) {
  return scattered_product(with_first(x, x.size(0), w.size(0)), w.options(), tp, mailbox, addend,
                           [&](int64_t begin, int64_t count, const at::Tensor& y) {
                             linear_forward_into(x.narrow(0, begin, count), w, {}, y);
                           });
}

at::Tensor scattered_quantized_forward(const QuantizedMatrix& x, const QuantizedMatrix& w,
                                       at::ScalarType type, const ProcessGroup& tp,
                                       PeerMailbox* mailbox, const at::Tensor& addend) {
  MEGATRON_ASSERT(x.layout == ScaleLayout::kRow, "parts of rows without scales of their own");
  return scattered_product({x.codes.size(0), w.codes.size(0)}, x.codes.options().dtype(type), tp,
                           mailbox, addend, [&](int64_t begin, int64_t count, const at::Tensor& y) {
                             quantized_product_out({x.codes.narrow(0, begin, count),
                                                    x.scale.narrow(0, begin, count), x.layout},
                                                   w, y, {}, /*fast=*/true);
                           });
}

}  // namespace megatron
