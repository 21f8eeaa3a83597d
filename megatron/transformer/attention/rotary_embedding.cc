#include "megatron/transformer/attention/rotary_embedding.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// base^(2 i / width), [width / 2].
at::Tensor powers(double base, int64_t width, at::ScalarType type, at::Device device) {
  const at::Tensor exponents =
      at::arange(0, width, 2, at::dtype(type).device(device)) / static_cast<double>(width);
  return at::pow(base, exponents);
}

// Long wavelengths are divided by the factor, short ones kept, those between blended.
at::Tensor llama3_frequencies(const TransformerConfig& c, const at::Tensor& frequencies) {
  const double low = c.rope_low_freq_factor, high = c.rope_high_freq_factor;
  const auto original = static_cast<double>(c.rope_original_max_position_embeddings);
  const at::Tensor wavelengths = 2 * std::numbers::pi / frequencies;
  const at::Tensor scaled = frequencies / c.rope_scaling_factor;
  const at::Tensor smooth = (original / wavelengths - low) / (high - low);
  const at::Tensor blended = (1 - smooth) * scaled + smooth * frequencies;
  const at::Tensor result = at::where(wavelengths > original / low, scaled, frequencies);
  const at::Tensor between =
      (wavelengths <= original / low).logical_and(wavelengths >= original / high);
  return at::where(between, blended, result);
}

// Frequencies with many rotations within the original length are kept, those with few are divided
// by the factor, with a linear ramp in between.
at::Tensor yarn_frequencies(const TransformerConfig& c, double factor, const at::Tensor& powers) {
  const auto width = static_cast<double>(c.rotary_width()), base = c.rotary_base;
  const auto original = static_cast<double>(c.rope_original_max_position_embeddings);
  const auto dimension_of = [&](double turns) {
    return width * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double low = dimension_of(c.yarn_beta_fast), high = dimension_of(c.yarn_beta_slow);
  if (c.yarn_correction_range_round_to_int) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  const at::Tensor ramp =
      ((at::arange(powers.size(0), powers.options()) - low) / (high - low)).clamp(0, 1);
  const at::Tensor kept = 1 - ramp;
  return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept;
}

// [s, b, sections] -> [s, b, r]: each rotated pair has the position of its section. Without a copy
// from the host, which a CUDA graph could not hold.
at::Tensor positions_of_pairs(const at::Tensor& positions, const std::vector<int64_t>& sections) {
  std::vector<at::Tensor> of_pairs;
  for (size_t i = 0; i < sections.size(); ++i)
    of_pairs.push_back(
        positions.narrow(2, static_cast<int64_t>(i), 1).expand({-1, -1, sections[i]}));
  return at::cat(of_pairs, 2);
}

}  // namespace

RotaryEmbedding::RotaryEmbedding(const TransformerConfig& config)
    : config_(config), scaling_(config.rotary_scaling()) {}

at::Tensor RotaryEmbedding::scaled_frequencies(at::ScalarType type, at::Device device,
                                               bool beyond) const {
  const TransformerConfig& c = config_;
  const at::Tensor base = c.sections_begin_anew
                              ? powers(c.rotary_base, 2 * c.mrope_section.front(), type, device)
                                    .repeat({std::ssize(c.mrope_section)})
                              : powers(c.rotary_base, c.rotary_width(), type, device);
  switch (scaling_.type) {
    case RopeScaling::kNone:
      return 1.0 / base;
    case RopeScaling::kLinear:
      return 1.0 / base / scaling_.factor;
    case RopeScaling::kLlama3:
      return llama3_frequencies(c, 1.0 / base);
    case RopeScaling::kYarn:
      return yarn_frequencies(c, scaling_.factor, base);
    case RopeScaling::kLongRope: {
      const std::vector<double>& factors =
          beyond ? c.longrope_long_factor : c.longrope_short_factor;
      return 1.0 / (at::tensor(factors, at::dtype(type)).to(device) * base);
    }
  }
  return {};
}

double RotaryEmbedding::attention_factor() const {
  if (scaling_.attention_factor) return *scaling_.attention_factor;
  const double factor = scaling_.factor;
  if (factor <= 1.0) return 1.0;
  if (scaling_.type == RopeScaling::kYarn) return 0.1 * std::log(factor) + 1.0;
  if (scaling_.type != RopeScaling::kLongRope) return 1.0;
  const auto original = static_cast<double>(config_.rope_original_max_position_embeddings);
  return std::sqrt(1.0 + std::log(factor) / std::log(original));
}

at::Tensor RotaryEmbedding::frequencies(int64_t length) const {
  return scaled_frequencies(at::kDouble, at::kCPU,
                            length > config_.rope_original_max_position_embeddings);
}

LayerRotary RotaryEmbedding::tables(const at::Tensor& positions, at::ScalarType type,
                                    const at::Tensor& last) const {
  const at::NoGradGuard no_grad;
  const auto precision = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Device device = positions.device();
  // [s], [s, b] or [s, b, r]
  at::Tensor at_positions =
      (positions.dim() >= 2 ? positions.transpose(0, 1) : positions).to(precision).contiguous();
  if (positions.dim() == 3)
    at_positions = positions_of_pairs(at_positions, config_.mrope_section);
  else
    at_positions.unsqueeze_(-1);
  if (config_.rotary_seq_len_interpolation_factor)
    at_positions =
        at_positions * (1.0 / static_cast<double>(*config_.rotary_seq_len_interpolation_factor));
  const auto tables_of = [&](const at::Tensor& frequencies, double factor) {
    const at::Tensor angles = at_positions * frequencies;
    RotaryTables tables{angles.cos(), angles.sin(), config_.rotary_interleaved};
    if (factor != 1.0) {
      tables.cos.mul_(factor);
      tables.sin.mul_(factor);
    }
    return tables;
  };

  at::Tensor frequencies = scaled_frequencies(precision, device, /*beyond=*/false);
  if (scaling_.type == RopeScaling::kLongRope) {
    const at::Tensor longest =
        last.defined() ? last.view({-1, 1, 1}) : positions.amax(-1, /*keepdim=*/true);
    const at::Tensor beyond =
        longest.ge(config_.rope_original_max_position_embeddings);  // [1], [b, 1] or [s, 1, 1]
    frequencies =
        at::where(beyond, scaled_frequencies(precision, device, /*beyond=*/true), frequencies);
  }
  LayerRotary rotary;
  rotary.all = tables_of(frequencies, attention_factor());
  if (config_.rotary_base_local)
    rotary.local = tables_of(
        1.0 / powers(*config_.rotary_base_local, config_.rotary_width(), precision, device), 1.0);
  return rotary;
}

}  // namespace megatron
