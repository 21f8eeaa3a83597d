// FP8 results of the kernels for rows that lie by expert (tensor/experts/grouped_quantization.h).
#pragma once

#include "megatron/kernels/fp8/fp8_experts.h"
#include "megatron/tensor/experts/grouped_quantization.h"

namespace megatron {

// Matrices for [rows of `like`, columns] of experts; only the wanted ones.
QuantizedTensor empty_expert_codes(const at::Tensor& like, int64_t columns, int64_t experts,
                                   at::ScalarType type, const QuantizationOptions& options,
                                   Orientations wanted);

// Throws unless experts have FP8 operands of this recipe in rows of `columns`.
void check_expert_columns(int64_t columns, const QuantizationOptions& options);

Fp8Type kernel_type_of(at::ScalarType type);

// A launch for rows [rows of `like`, columns] of all experts, in the type of `like`, into `out`;
// without counts all have equally many. The workspace must outlive the launch's enqueuing.
struct ExpertCastLaunch {
  Fp8ExpertCast cast;
  at::Tensor workspace;
};
ExpertCastLaunch expert_cast_into(const QuantizedTensor& out, at::ScalarType type,
                                  const at::Tensor& like, int64_t columns, const at::Tensor& counts,
                                  int64_t experts, const ExpertScales& by);

}  // namespace megatron
