#include "megatron/tensor/decoding/int8_weight.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/int8/int8_product.h"
#include "megatron/tensor/detail/launch.h"

namespace megatron {
namespace {

// A type that kernels read.
at::Tensor readable(const at::Tensor& x) {
  return as_contiguous(x, x.scalar_type() == at::kDouble ? at::kFloat : x.scalar_type());
}

at::Tensor as_floats(const at::Tensor& x) {
  return x.defined() ? as_contiguous(x, at::kFloat) : at::Tensor();
}

const float* floats(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<float>() : nullptr;
}

}  // namespace

int64_t int8_bytes(int64_t outputs, int64_t inner) {
  return int8_panels(outputs) * int8_panel_bytes(inner) +
         outputs * static_cast<int64_t>(sizeof(float));
}

Int8Weight to_int8(const at::Tensor& weight) {
  MEGATRON_ASSERT(weight.is_cpu() && weight.dim() == 2, "a weight of ", weight.dim(),
                  " dimensions on ", weight.device().str());
  const at::Tensor w = readable(weight);
  Int8Weight out;
  out.outputs = w.size(0);
  out.inner = w.size(1);
  const int64_t panels = int8_panels(out.outputs);
  out.panels = at::empty({panels, int8_panel_bytes(out.inner)}, at::dtype(at::kChar));
  out.scales = at::empty({out.outputs}, at::dtype(at::kFloat));
  const Int8Weights args{to_dtype(w.scalar_type()),
                         out.outputs,
                         out.inner,
                         w.const_data_ptr(),
                         out.panels.data_ptr<int8_t>(),
                         out.scales.data_ptr<float>()};
  parallel_rows(panels, kInt8PanelOutputs * out.inner,
                [&](int64_t begin, int64_t end) { int8_weights_cpu(args, begin, end); });
  return out;
}

at::Tensor int8_product(const at::Tensor& x, const Int8Weight& weight, const at::Tensor& bias,
                        const at::Tensor& addend) {
  MEGATRON_ASSERT(x.size(-1) == weight.inner, "rows of ", x.size(-1), " times a weight of ",
                  weight.inner, " inputs");
  constexpr int64_t kCostOfProduct = 2;  // reading a code, next to a product in fp32
  const at::Tensor rows = readable(x);
  const int64_t count = rows.numel() / std::max<int64_t>(1, weight.inner);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.outputs;
  const at::Tensor codes = at::empty({count, int8_inner(weight.inner)}, at::dtype(at::kByte)),
                   scales = at::empty({count}, at::dtype(at::kFloat)),
                   y = at::empty(shape, at::dtype(at::kFloat)), shift = as_floats(bias),
                   added = as_floats(addend);
  const Int8Rows cast{to_dtype(rows.scalar_type()),
                      count,
                      weight.inner,
                      rows.const_data_ptr(),
                      codes.data_ptr<uint8_t>(),
                      scales.data_ptr<float>()};
  parallel_rows(count, weight.inner,
                [&](int64_t begin, int64_t end) { int8_rows_cpu(cast, begin, end); });
  Int8Product args;
  args.rows = count;
  args.outputs = weight.outputs;
  args.inner = weight.inner;
  args.x = codes.const_data_ptr<uint8_t>();
  args.x_scales = floats(scales);
  args.panels = weight.panels.const_data_ptr<int8_t>();
  args.scales = floats(weight.scales);
  args.bias = floats(shift);
  args.addend = floats(added);
  args.y = y.data_ptr<float>();
  args.path = int8_paths().back();
  const int64_t cost =
      kCostOfProduct * kInt8PanelOutputs * weight.inner * std::max<int64_t>(1, count);
  parallel_rows(weight.panels.size(0), cost,
                [&](int64_t begin, int64_t end) { int8_product_cpu(args, begin, end); });
  return y.to(x.scalar_type());
}

}  // namespace megatron
