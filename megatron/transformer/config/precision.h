// Types in which layers compute: the residual stream, and the products of linears in FP8 or FP4.
// The head, the embedding and attention stay in the model's type.
#pragma once

#include <cstdint>

#include "megatron/tensor/quantization_options.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

// kHybrid: E4M3, but E5M2 for output gradients. kMxfp8 and kCustom are parsed and refused.
enum class Fp8Format { kNone, kE4M3, kHybrid };
enum class Fp8Recipe { kDelayed, kTensorwise, kBlockwise, kMxfp8, kCustom };
enum class AmaxAlgorithm { kMostRecent, kMax };
enum class Fp4Format { kNone, kE2M1 };
enum class Fp4Recipe { kNvfp4, kCustom };

struct PrecisionConfig {
  bool fp32_residual_connection = false;
  // -- linear layers
  Fp8Format fp8_format = Fp8Format::kNone;
  Fp8Recipe fp8_recipe = Fp8Recipe::kDelayed;
  int64_t fp8_margin = 0;            // delayed: scales are divided by 2^margin
  int64_t fp8_amax_history_len = 1;  // delayed: steps
  AmaxAlgorithm fp8_amax_compute_algo = AmaxAlgorithm::kMostRecent;
  bool fp8_wgrad = true;  // false: weight-gradient GEMMs use operands in the model's type
  Fp4Format fp4_format = Fp4Format::kNone;
  Fp4Recipe fp4_recipe = Fp4Recipe::kNvfp4;
  bool first_last_layers_bf16 = false;  // layers at both ends are not quantised; how many:
  int64_t num_layers_at_start_in_bf16 = 1, num_layers_at_end_in_bf16 = 1;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool is_quantized() const {
    return fp8_format != Fp8Format::kNone || fp4_format != Fp4Format::kNone;
  }
  // Quantisation of the linears of one of `num_layers` layers, which count from 1.
  QuantizationOptions quantization(int64_t layer_number, int64_t num_layers) const;
  void remove_quantization();  // all GEMMs in the model's type, as in inference
};

}  // namespace megatron
