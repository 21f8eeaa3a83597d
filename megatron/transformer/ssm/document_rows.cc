#include "megatron/transformer/ssm/document_rows.h"

#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor DocumentRows::of(const at::Tensor& x) const {
  return x.narrow(1, sequence, 1).narrow(0, first, count);
}

std::vector<DocumentRows> document_rows(const at::Tensor& runs) {
  const at::Tensor by_sequence = runs.t().to(at::kCPU, at::kLong).contiguous();
  const int64_t s = runs.size(0), b = runs.size(1);
  const auto* run = by_sequence.const_data_ptr<int64_t>();
  std::vector<DocumentRows> all;
  for (int64_t i = 0; i < b; ++i)
    for (int64_t row = 0; row < s; ++row) {
      if (row == 0 || run[i * s + row] != run[i * s + row - 1]) all.push_back({i, row, 0});
      ++all.back().count;
    }
  return all;
}

}  // namespace megatron
