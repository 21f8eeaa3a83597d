// Builds without CUDA have no kernels of state-space layers.
#include "megatron/tensor/ssm/ssm_kernels.h"

namespace megatron::ssm_kernels {

std::optional<at::Tensor> causal_conv(const ConvOperands&) { return std::nullopt; }
std::optional<ConvGrads> causal_conv_backward(const at::Tensor&, const ConvOperands&,
                                              const at::Tensor&) {
  return std::nullopt;
}
std::optional<NormResult> gated_norm(const NormOperands&, int64_t, double) { return std::nullopt; }
std::optional<at::Tensor> gated_norm_apply(const NormOperands&, const at::Tensor&) {
  return std::nullopt;
}
std::optional<NormGrads> gated_norm_backward(const at::Tensor&, const NormOperands&, int64_t,
                                             double, const at::Tensor&) {
  return std::nullopt;
}
std::optional<NormResult> normed_gate(const NormOperands&, double) { return std::nullopt; }
std::optional<at::Tensor> normed_gate_apply(const NormOperands&, const at::Tensor&) {
  return std::nullopt;
}
std::optional<NormGrads> normed_gate_backward(const at::Tensor&, const NormOperands&,
                                              const at::Tensor&, const at::Tensor&) {
  return std::nullopt;
}
bool has_scans() { return false; }
std::optional<ScanOutputs> ssd_scan(const ScanTensors&) { return std::nullopt; }
std::optional<ScanOutputs> ssd_step(const ScanTensors&) { return std::nullopt; }
std::optional<ScanGradients> ssd_scan_backward(const at::Tensor&, const at::Tensor&,
                                               const ScanTensors&, const ScanGradients&) {
  return std::nullopt;
}
std::optional<at::Tensor> unit_length(const at::Tensor&) { return std::nullopt; }
std::optional<at::Tensor> unit_length_backward(const at::Tensor&, const at::Tensor&,
                                               const at::Tensor&) {
  return std::nullopt;
}
std::optional<DeltaOutputs> delta_rule(const DeltaTensors&) { return std::nullopt; }
std::optional<DeltaGradients> delta_rule_backward(const at::Tensor&, const at::Tensor&,
                                                  const DeltaTensors&, const DeltaGradients&) {
  return std::nullopt;
}

}  // namespace megatron::ssm_kernels
