#include "megatron/tensor_parallel/divided_rows.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

thread_local const DividedRows* current_rows = nullptr;

// Rows of the tiles of quantised products
constexpr int64_t kUnit = 16;

}  // namespace

int64_t DividedRows::count_of(int64_t rows, int ranks) {
  return (rows + ranks * kUnit - 1) / (ranks * kUnit) * kUnit;
}

const DividedRows* DividedRows::current() { return current_rows; }

DividedRows::DividedRows(int64_t rows, const ProcessGroup& tp)
    : rows_(rows), count_(count_of(rows, tp.size())), tp_(tp) {
  MEGATRON_ASSERT(current_rows == nullptr, "rows are divided already");
  current_rows = this;
}

DividedRows::~DividedRows() { current_rows = nullptr; }

at::Tensor DividedRows::own(const at::Tensor& x) const {
  MEGATRON_ASSERT(x.size(0) == rows_, x.size(0), " rows where ", rows_, " are divided");
  const int64_t begin = std::min(rows_, tp_.rank() * count_),
                some = std::min(count_, rows_ - begin);
  const at::Tensor part = x.narrow(0, begin, some);
  if (some == count_) return part;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.front() = count_ - some;
  return at::cat({part, at::zeros(shape, x.options())});
}

at::Tensor DividedRows::filled(const at::Tensor& x) const {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.front() = tp_.size() * count_ - x.size(0);
  return shape.front() == 0 ? x : at::cat({x, at::zeros(shape, x.options())});
}

at::Tensor DividedRows::all(const at::Tensor& own) const {
  const std::shared_ptr<PeerMailbox> mailbox = tp_.mailbox();
  return without_filling(all_gather_first_dim(own, tp_, mailbox.get()));
}

}  // namespace megatron
