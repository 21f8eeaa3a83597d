#include "megatron/tensor/decoding/state_buffer.h"

#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor host_like(const at::Tensor& data, int64_t rows) {
  std::vector<int64_t> shape = data.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, data.options().device(at::kCPU).pinned_memory(data.is_cuda()));
}

void copy_rows(const at::Tensor& to, const std::vector<int64_t>& to_rows, const at::Tensor& from,
               const std::vector<int64_t>& from_rows) {
  MEGATRON_ASSERT(to_rows.size() == from_rows.size(), from_rows.size(), " rows to ",
                  to_rows.size());
  for (size_t i = 0; i < to_rows.size(); ++i)
    to[to_rows[i]].copy_(from[from_rows[i]], /*non_blocking=*/true);
}

}  // namespace

void StateBuffer::reserve(int64_t rows, at::IntArrayRef shape, const at::TensorOptions& options) {
  MEGATRON_ASSERT(!absent_.defined(), "a buffer is used while it is on the host");
  if (data_.defined() && data_.size(0) >= rows) return;
  std::vector<int64_t> whole = shape.vec();
  whole.insert(whole.begin(), rows);
  at::Tensor larger = at::empty(whole, options);
  if (data_.defined()) larger.narrow(0, 0, data_.size(0)).copy_(data_);
  data_ = std::move(larger);
}

void StateBuffer::copy_row(int64_t from, int64_t to, int64_t leading) {
  if (!data_.defined()) return;
  data_[to].narrow(0, 0, leading).copy_(data_[from].narrow(0, 0, leading));
}

void StateBuffer::swap_out(const Rows& rows, int64_t host_rows) {
  if (!data_.defined() || rows.from.empty()) return;
  if (!host_.defined()) host_ = host_like(data_, host_rows);
  copy_rows(host_, rows.to, data_, rows.from);
}

void StateBuffer::swap_in(const Rows& rows) {
  if (!data_.defined() || rows.from.empty()) return;
  MEGATRON_ASSERT(host_.defined(), "rows are swapped in that were not swapped out");
  copy_rows(data_, rows.to, host_, rows.from);
}

void StateBuffer::fill_with_nan(const std::vector<int64_t>& rows) {
  if (!data_.defined()) return;
  // The code of NaN in E4M3, which is held as bytes
  const double nan =
      data_.scalar_type() == at::kByte ? 0x7f : std::numeric_limits<double>::quiet_NaN();
  for (const int64_t row : rows) data_[row].fill_(nan);
}

void StateBuffer::offload(bool keep) {
  if (!data_.defined()) return;
  if (keep) {
    parked_ = host_like(data_, data_.size(0));
    parked_.copy_(data_);
  }
  absent_ = at::empty({1}, data_.options()).expand(data_.sizes());
  data_.reset();
}

void StateBuffer::reload() {
  if (!absent_.defined()) return;
  data_ = at::empty(absent_.sizes(), absent_.options());
  if (parked_.defined()) {
    data_.copy_(parked_);
  } else {
    data_.zero_();
  }
  parked_.reset();
  absent_.reset();
}

void StateBuffer::clear() {
  data_.reset();
  host_.reset();
  parked_.reset();
  absent_.reset();
}

int64_t StateBuffer::bytes() const {
  return data_.defined() ? static_cast<int64_t>(data_.nbytes()) : 0;
}

at::Tensor SlotBuffer::rows(int64_t slots, at::IntArrayRef shape,
                            const at::TensorOptions& options) {
  const int64_t held = data_.defined() ? data_.size(0) : 0;
  reserve(slots, shape, options);
  if (data_.size(0) > held) data_.narrow(0, held, data_.size(0) - held).zero_();
  return data_;
}

}  // namespace megatron
