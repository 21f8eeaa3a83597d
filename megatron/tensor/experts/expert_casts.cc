#include "megatron/tensor/detail/expert_casts.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Behind how many rows of a flat `columns` matrix an expert's lie at most.
int64_t padded_bound(int64_t rows, int64_t experts, int64_t unit) {
  return (rows + experts * (unit - 1) + unit - 1) / unit * unit;
}

}  // namespace

void check_expert_columns(int64_t columns, const QuantizationOptions& options) {
  MEGATRON_ASSERT(options.recipe == QuantizationRecipe::kTensorwise ||
                      options.recipe == QuantizationRecipe::kDelayed ||
                      options.recipe == QuantizationRecipe::kBlockwise,
                  "an operand of experts without an FP8 recipe");
  MEGATRON_ASSERT(columns % options.alignment() == 0, "FP8 rows of experts with ", columns,
                  " columns, expected a multiple of ", options.alignment());
}

QuantizedTensor empty_expert_codes(const at::Tensor& like, int64_t columns, int64_t experts,
                                   at::ScalarType type, const QuantizationOptions& options,
                                   Orientations wanted) {
  const bool blocks = options.recipe == QuantizationRecipe::kBlockwise;
  const int64_t rows = like.size(0), padded = padded_bound(rows, experts, options.alignment());
  const auto codes = like.options().dtype(type), floats = like.options().dtype(at::kFloat);
  const ScaleLayout layout = blocks ? ScaleLayout::kVector128 : ScaleLayout::kTensor;
  const at::Tensor of_experts =
      blocks ? at::Tensor() : at::empty({experts, kFp8ScaleElements}, floats);
  const auto scales = [&](int64_t of_rows) {
    return blocks ? at::empty({columns / kFp8Block * of_rows}, floats) : of_experts;
  };
  QuantizedTensor out;
  if (wanted.rows) out.rows = {at::empty({rows, columns}, codes), scales(rows), layout};
  if (wanted.columns) out.columns = {at::empty({padded * columns}, codes), scales(padded), layout};
  return out;
}

Fp8Type kernel_type_of(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
}

#ifdef MEGATRON_CUDA
ExpertCastLaunch expert_cast_into(const QuantizedTensor& out, at::ScalarType type,
                                  const at::Tensor& like, int64_t columns, const at::Tensor& counts,
                                  int64_t experts, const ExpertScales& by) {
  const auto strided = [&](const at::Tensor& t, auto& pointer, int64_t& stride) {
    if (!t.defined()) return;
    check_shape("scales of experts", t, {experts});
    pointer = t.data_ptr<float>();
    stride = t.stride(0);
  };
  ExpertCastLaunch launch;
  Fp8ExpertCast& cast = launch.cast;
  cast.dtype = to_dtype(like.scalar_type());
  cast.type = kernel_type_of(type);
  cast.experts = experts;
  cast.rows = like.size(0);
  cast.columns = columns;
  if (counts.defined()) {
    cast.counts = counts.const_data_ptr();
    cast.wide_counts = counts.scalar_type() == at::kLong;
  }
  strided(by.scale, cast.given_scale, cast.given_stride);
  strided(by.new_amax, cast.new_amax, cast.amax_stride);
  if (by.row_amax.defined()) {
    check_shape("largest magnitudes of rows of experts", by.row_amax, {cast.rows});
    cast.row_amax = by.row_amax.const_data_ptr<float>();
  }
  const QuantizedMatrix& one = out.rows.defined() ? out.rows : out.columns;
  cast.blocks = one.defined() && one.layout != ScaleLayout::kTensor;
  if (out.rows.defined()) cast.in_rows = static_cast<uint8_t*>(out.rows.codes.data_ptr());
  if (out.columns.defined()) cast.in_columns = static_cast<uint8_t*>(out.columns.codes.data_ptr());
  if (one.defined() && !cast.blocks) cast.scale = one.scale.data_ptr<float>();
  if (cast.blocks && out.rows.defined()) cast.row_scales = out.rows.scale.data_ptr<float>();
  if (cast.blocks && out.columns.defined())
    cast.column_scales = out.columns.scale.data_ptr<float>();
  launch.workspace =
      at::empty({fp8_expert_workspace(cast.experts, cast.rows)}, like.options().dtype(at::kByte));
  cast.workspace = launch.workspace.data_ptr();
  return launch;
}
#endif

}  // namespace megatron
