// Loops over the rows of experts on the host, for products that the device has no kernel for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

// Calls f(expert, first row, rows) for every expert. Waits for the counts if they lie on a GPU.
template <class F>
void for_each_expert(const at::Tensor& counts, int64_t rows, const F& f) {
  const at::Tensor here = counts.to(at::kCPU, at::kLong);
  int64_t first = 0;
  for (int64_t expert = 0; expert < here.numel(); ++expert) {
    const int64_t count = here.const_data_ptr<int64_t>()[expert];
    MEGATRON_ASSERT(count >= 0 && first + count <= rows, "expert ", expert, " has ", count,
                    " rows behind ", first, " of ", rows);
    f(expert, first, count);
    first += count;
  }
}

// Calls product(in, out) for the rows of one expert. On the CPU for blocks of a fixed number of
// rows in memory of their own, in which a row's place follows from its number: BLAS libraries
// choose kernels by the number of rows, by place and by alignment, and so the order of a row's
// sums.
template <class F>
void multiply_rows(const at::Tensor& in, const at::Tensor& out, int64_t before, const F& product) {
  if (in.size(0) == 0) return;
  if (in.is_cuda()) return product(in, out);
  constexpr int64_t kBlockRows = 32;
  const at::Tensor block = at::zeros({kBlockRows, in.size(1)}, in.options());
  const at::Tensor result = at::empty({kBlockRows, out.size(1)}, out.options());
  for (int64_t first = 0; first < in.size(0);) {
    const int64_t place = (before + first) % kBlockRows;
    const int64_t rows = std::min(kBlockRows - place, in.size(0) - first);
    block.narrow(0, place, rows).copy_(in.narrow(0, first, rows));
    product(block, result);
    out.narrow(0, first, rows).copy_(result.narrow(0, place, rows));
    first += rows;
  }
}

inline int64_t rows_before(const at::Tensor& before, int64_t expert) {
  return before.defined() ? before.const_data_ptr<int64_t>()[expert] : 0;
}

}  // namespace megatron
