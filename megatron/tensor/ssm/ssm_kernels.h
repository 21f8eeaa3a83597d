// The kernels of state-space layers (kernels/ssm) on tensors. Each function returns nothing where
// there is no kernel: on a CPU, for other types than bf16, for sizes or strides that a kernel does
// not have, and for scans on a GPU that is no Hopper. Then tensor operations compute
// (transformer/ssm). Results are contiguous; they run on the current stream. A backward that is
// given places for gradients, which may be parts of wider rows, writes and returns those that it
// can; undefined ones, and those with other strides or types, are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace megatron::ssm_kernels {

// ---- causal convolution and SiLU

struct ConvOperands {
  at::Tensor u;            // [s, b, C]
  at::Tensor weight;       // [C, 1, K]
  at::Tensor bias;         // [C]; undefined: none
  at::Tensor before;       // [K - 1, b, C] rows before the first; undefined: zeros
  at::Tensor runs;         // [s, b] int64, another number where a document starts; undefined: one
  at::Tensor runs_before;  // [K - 1, b] of the rows before; undefined: as the first row
};
struct ConvGrads {
  at::Tensor u, weight, bias, before;  // weight and bias in fp32
};
std::optional<at::Tensor> causal_conv(const ConvOperands& operands);
std::optional<ConvGrads> causal_conv_backward(const at::Tensor& dy, const ConvOperands& operands,
                                              const at::Tensor& du = {});

// ---- norm of y silu(z) over groups of neighbouring channels

struct NormOperands {
  at::Tensor y, z;  // [s, b, d]
  at::Tensor w;     // [d]
};
struct NormResult {
  at::Tensor o, rstd;  // [s, b, d]; [s, b, groups] fp32
};
struct NormGrads {
  at::Tensor y, z, w;  // w in fp32
};
std::optional<NormResult> gated_norm(const NormOperands& operands, int64_t groups, double eps);
// With rstd [s, b, groups] as given: of the same rstd the same bits.
std::optional<at::Tensor> gated_norm_apply(const NormOperands& operands, const at::Tensor& rstd);
std::optional<NormGrads> gated_norm_backward(const at::Tensor& grad, const NormOperands& operands,
                                             int64_t groups, double eps, const at::Tensor& dz = {});

// Norm of y over each head, then silu(z): y, z [s, b, H, V], w [V], rstd [s, b, H] fp32.
std::optional<NormResult> normed_gate(const NormOperands& operands, double eps);
std::optional<at::Tensor> normed_gate_apply(const NormOperands& operands, const at::Tensor& rstd);
std::optional<NormGrads> normed_gate_backward(const at::Tensor& grad, const NormOperands& operands,
                                              const at::Tensor& rstd, const at::Tensor& dz = {});

// ---- the scan of Mamba-2

struct ScanTensors {
  at::Tensor x;           // [s, b, H, P]
  at::Tensor dt;          // [s, b, H] fp32
  at::Tensor A;           // [H] fp32
  at::Tensor B, C;        // [s, b, G, N]
  at::Tensor D;           // [H] fp32
  at::Tensor runs;        // [s, b] int64; undefined: one document
  at::Tensor state = {};  // [b, H, P, N] fp32 before the first row; undefined: zero
  at::Tensor run = {};    // [b] the run that it belongs to; undefined: that of the first row
};
struct ScanOutputs {
  at::Tensor y, state;  // the state after the last row
};
struct ScanGradients {
  at::Tensor x, dt, A, B, C, D, state;  // x, B, C in bf16, the others in fp32
};
bool has_scans();  // on the current GPU
std::optional<ScanOutputs> ssd_scan(const ScanTensors& operands);
std::optional<ScanOutputs> ssd_step(const ScanTensors& operands);  // s = 1, without runs
std::optional<ScanGradients> ssd_scan_backward(const at::Tensor& dy, const at::Tensor& dstate,
                                               const ScanTensors& operands,
                                               const ScanGradients& places = {});

// ---- the gated delta rule

// x / sqrt(sum of squares + 1e-6) of queries or keys [s, b, H, K] in bf16, which is what the rule's
// kernel multiplies; nothing where there is none for heads of K.
std::optional<at::Tensor> unit_length(const at::Tensor& x);
std::optional<at::Tensor> unit_length_backward(const at::Tensor& grad, const at::Tensor& x,
                                               const at::Tensor& dx = {});

struct DeltaTensors {
  at::Tensor q, k;        // [s, b, Hk, K]
  at::Tensor v;           // [s, b, Hv, V]
  at::Tensor g, beta;     // [s, b, Hv] fp32
  at::Tensor runs;        // [s, b] int64; undefined: one document
  at::Tensor state = {};  // [b, Hv, K, V] fp32 before the first row; undefined: zero
  at::Tensor run = {};    // [b] the run that it belongs to; undefined: that of the first row
};
struct DeltaOutputs {
  at::Tensor o, state;  // the state after the last row
};
constexpr int64_t kDeltaChunk = 64;  // rows of a chunk of the kernels
struct DeltaGradients {
  at::Tensor q, k, v, g, beta, state;  // q, k, v in bf16, the others in fp32
};
std::optional<DeltaOutputs> delta_rule(const DeltaTensors& operands);
std::optional<DeltaGradients> delta_rule_backward(const at::Tensor& grad, const at::Tensor& dstate,
                                                  const DeltaTensors& operands,
                                                  const DeltaGradients& places = {});

}  // namespace megatron::ssm_kernels
