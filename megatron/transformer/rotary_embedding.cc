#include "megatron/transformer/rotary_embedding.h"

#include <numbers>

#include "megatron/tensor/torch.h"

namespace megatron {

RotaryEmbedding::RotaryEmbedding(const TransformerConfig& config) : config_(config) {}

at::Tensor RotaryEmbedding::inverse_frequencies(at::ScalarType type, at::Device device) const {
  const auto width =
      static_cast<int64_t>(static_cast<double>(config_.kv_channels) * config_.rotary_percent);
  const at::Tensor exponents =
      at::arange(0, width, 2, at::dtype(type).device(device)) / static_cast<double>(width);
  at::Tensor frequencies = 1.0 / at::pow(static_cast<double>(config_.rotary_base), exponents);
  if (!config_.use_rope_scaling) return frequencies;
  // Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended.
  constexpr double kLow = 1.0, kHigh = 4.0, kOldContext = 8192.0;
  const at::Tensor wavelengths = 2 * std::numbers::pi / frequencies;
  const at::Tensor scaled = frequencies / config_.rope_scaling_factor;
  const at::Tensor smooth = (kOldContext / wavelengths - kLow) / (kHigh - kLow);
  const at::Tensor blended = (1 - smooth) * scaled + smooth * frequencies;
  const at::Tensor result = at::where(wavelengths > kOldContext / kLow, scaled, frequencies);
  const at::Tensor between =
      (wavelengths <= kOldContext / kLow).logical_and(wavelengths >= kOldContext / kHigh);
  return at::where(between, blended, result);
}

RotaryTables RotaryEmbedding::tables(const at::Tensor& positions, at::ScalarType type) const {
  const at::NoGradGuard no_grad;
  const auto precision = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor frequencies = inverse_frequencies(precision, positions.device());
  at::Tensor at_positions =
      (positions.dim() == 2 ? positions.t() : positions).to(precision).contiguous();
  if (config_.rotary_seq_len_interpolation_factor)
    at_positions =
        at_positions * (1.0 / static_cast<double>(*config_.rotary_seq_len_interpolation_factor));
  const at::Tensor angles = at_positions.unsqueeze(-1) * frequencies;
  return {angles.cos(), angles.sin(), config_.rotary_interleaved};
}

}  // namespace megatron
