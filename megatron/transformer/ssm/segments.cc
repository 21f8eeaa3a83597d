#include "megatron/transformer/ssm/segments.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/process_group.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {

Segments::Segments(int64_t local, const at::Tensor& runs, int64_t width, const ProcessGroup& cp)
    : cp_(cp), width_(width), rows_(cp.size() == 1 ? local : local / 2) {
  const int64_t c = cp.size(), r = cp.rank();
  MEGATRON_ASSERT(c == 1 || local % 2 == 0, "a zig-zag part of ", local, " tokens");
  if (runs.defined()) check_shape("document runs", runs, {c * local, -1});
  for (const int64_t index :
       c == 1 ? std::vector<int64_t>{0} : std::vector<int64_t>{r, 2 * c - 1 - r}) {
    Segment segment;
    segment.index = index;
    segment.first = static_cast<int64_t>(own_.size()) * rows_;
    segment.rows = rows_;
    if (runs.defined()) {
      const int64_t begin = index * rows_;
      segment.runs = runs.narrow(0, begin, rows_);
      // Rows before the sequence are zero, whatever their document
      const int64_t before = std::min(width - 1, begin);
      segment.runs_before =
          at::cat({runs.narrow(0, 0, 1).expand({width - 1 - before, runs.size(1)}),
                   runs.narrow(0, begin - before, before)});
      segment.run = runs.select(0, std::max<int64_t>(begin - 1, 0));
    }
    own_.push_back(std::move(segment));
  }
}

std::shared_ptr<const Segments> Segments::of_pass(const ForwardContext& pass, int64_t local,
                                                  int64_t width, const ProcessGroup& cp) {
  MEGATRON_ASSERT(pass.document_runs.defined() == pass.document_ids.defined(),
                  "a pass has document ids without document_runs()");
  return std::make_shared<const Segments>(local, pass.document_runs, width,
                                          pass.cp != nullptr ? *pass.cp : cp);
}

bool Segments::exchanges() const { return cp_.size() > 1; }

int64_t Segments::count() const { return exchanges() ? 2 * cp_.size() : 1; }

std::vector<at::Tensor> Segments::own_of(const std::vector<at::Tensor>& all) const {
  std::vector<at::Tensor> own;
  for (const Segment& segment : own_) own.push_back(all[static_cast<size_t>(segment.index)]);
  return own;
}

std::vector<at::Tensor> Segments::of_all(const std::vector<at::Tensor>& own) const {
  if (!exchanges()) return own;
  const at::Tensor mine = at::stack(own).contiguous();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape.insert(shape.begin(), cp_.size());
  const at::Tensor all = at::empty(shape, mine.options());
  cp_.all_gather(all, mine)->wait();
  std::vector<at::Tensor> in_order;
  for (int64_t rank = 0; rank < cp_.size(); ++rank) in_order.push_back(all[rank][0]);
  for (int64_t rank = cp_.size(); rank-- > 0;) in_order.push_back(all[rank][1]);
  return in_order;
}

std::vector<at::Tensor> Segments::rows_before(const at::Tensor& u) const {
  if (!exchanges()) return {at::Tensor()};
  const int64_t tail = std::min(width_ - 1, rows_);
  std::vector<at::Tensor> tails;
  for (const Segment& segment : own_)
    tails.push_back(segment.rows_of(u).narrow(0, rows_ - tail, tail));
  std::vector<at::Tensor> all = of_all(tails);
  all.insert(all.begin(), at::zeros({width_ - 1, u.size(1), u.size(2)}, u.options()));
  std::vector<at::Tensor> before;
  for (const Segment& segment : own_) {
    const at::Tensor rows = at::cat(at::TensorList(all).slice(0, segment.index + 1));
    before.push_back(rows.narrow(0, rows.size(0) - (width_ - 1), width_ - 1));
  }
  return before;
}

void Segments::return_row_grads(const std::vector<at::Tensor>& grads, const at::Tensor& du) const {
  if (!exchanges()) return;
  const std::vector<at::Tensor> all = of_all(grads);
  for (const Segment& segment : own_) {
    const int64_t begin = segment.index * rows_, end = begin + rows_;
    for (int64_t later = segment.index + 1; later < count(); ++later) {
      const int64_t first = later * rows_ - (width_ - 1);  // row of the text of its row 0
      const int64_t from = std::max(first, begin), to = std::min(first + width_ - 1, end);
      if (from >= to) break;
      segment.rows_of(du)
          .narrow(0, from - begin, to - from)
          .add_(all[static_cast<size_t>(later)].narrow(0, from - first, to - from));
    }
  }
}

std::vector<at::Tensor> states_before(const std::vector<at::Tensor>& decay,
                                      const std::vector<at::Tensor>& added) {
  std::vector<at::Tensor> states = {at::zeros_like(added.front())};
  for (size_t i = 0; i + 1 < added.size(); ++i)
    states.push_back(decay[i] * states.back() + added[i]);
  return states;
}

std::vector<at::Tensor> state_grads_after(const std::vector<at::Tensor>& decay,
                                          const std::vector<at::Tensor>& own) {
  std::vector<at::Tensor> grads(own.size());
  grads.back() = at::zeros_like(own.back());
  for (size_t i = own.size() - 1; i > 0; --i) grads[i - 1] = decay[i] * grads[i] + own[i];
  return grads;
}

}  // namespace megatron
