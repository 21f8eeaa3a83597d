// A parameter: its value, its placement in the mesh, its initialisation, and the owner of its
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "megatron/comm/mesh.h"
#include "megatron/tensor/quantization_options.h"

namespace megatron {

// `dim` is split over `axis`; `parts` are the sizes of the pieces that are split one by one (a
// gated FC1 is {ffn, ffn}); empty: one piece.
struct Shard {
  int dim = 0;
  Axis axis = Axis::kTensor;
  std::vector<int64_t> parts;
};

// Placement is data; reductions are derived from it (nn/reduction.h). See Note [Placement] in
// nn/placement.cc.
struct Placement {
  std::vector<Shard> shards;  // none: replicated on every rank
  AxisSet partial_grad;       // axes over which a rank's gradient is only a partial sum
  bool expert = false;        // of an expert: lies in the mesh's grid of experts
};

// How a parameter is initialised. Random numbers are position-keyed: by index in the global
// unpadded tensor.
struct Init {
  enum class Kind : uint8_t { kZero, kOne, kNormal, kUniform, kFunction, kSinusoids };
  using Function = at::Tensor (*)(const at::Tensor&);
  Kind kind = Kind::kZero;
  // kNormal: the standard deviation; kUniform, kFunction: the largest number drawn
  double std = 0.0;
  double least = 0.0;           // kFunction: the least number drawn
  Function function = nullptr;  // kFunction: of what is drawn, in fp64
  static Init zero() { return {}; }
  static Init one() { return {Kind::kOne, 0.0}; }
  static Init normal(double std) { return {Kind::kNormal, std}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
  // Of place t, column j of n: sin(t w_j) in the first half of the columns, cos(t w_{j - n/2}) in
  // the second; w_i = 10000^(-i / (n/2 - 1)). Vaswani et al. 2017 (arXiv:1706.03762), as Whisper.
  static Init sinusoids() { return {Kind::kSinusoids}; }
  // function(uniform in [least, most))
  static Init uniform_through(Function function, double least, double most) {
    return {Kind::kFunction, most, least, function};
  }
};

// Kinds of parameters that the optimizer may treat differently.
enum class ParameterRole : uint8_t { kWeight, kBias, kNorm, kQKNorm, kEmbedding, kOutput };

class ParameterStore;
class ProcessGroup;
struct QuantizedTensor;

// Elements of a vector that stay zero: of each `period` of them `count` from `first` on. They begin
// as zeros and have no gradient.
struct FixedZeros {
  int64_t period = 0, first = 0, count = 0;  // count 0: there are none
};

struct Parameter {
  // Full logical name, "decoder.layers.3.mlp.linear_fc1.weight"; set by Module::name_parameters
  std::string name;
  // This rank's shard, of value_type(); undefined until a store has allocated it
  at::Tensor value;
  std::vector<int64_t> local_shape;   // of value
  std::vector<int64_t> global_shape;  // of the logical tensor, with vocabulary padding
  // Rows of the global tensor without vocabulary padding; -1: all. Padded rows stay zero
  int64_t valid_rows = -1;
  Placement placement;
  Init init;
  ParameterRole role = ParameterRole::kWeight;
  bool trainable = true;
  double lr_factor = 1.0;  // times the learning rate of the schedule
  FixedZeros zeros = {};
  // The value is fp32 in models of narrower types, too: where rounding it would change what the
  // layer computes by more than its other roundings. Its value is its master weight. Never
  // quantised.
  bool keeps_fp32 = false;
  // The stages that hold copies of it (a tied embedding over pipeline stages), or null. Copies have
  // the same name and initialisation; their gradients are summed over this group before any other
  // reduction, and only the first copy counts in norms and is stored.
  const ProcessGroup* shared = nullptr;
  // How products with this weight are quantised: copies of it in both orientations are kept while
  // the value stays the same.
  QuantizationRecipe quantization = QuantizationRecipe::kNone;
  // Its layer reads the value itself, in addition to quantised products.
  bool read_unquantized = false;
  // Set if they use delayed scaling, whose state its store keeps; a weight of experts has scales
  // for every index of its dimension 0.
  std::optional<DelayedScalingOptions> delayed_scaling = {};
  int uses = 1;                     // uses per pass: 2 for a tied embedding
  ParameterStore* store = nullptr;  // owner of value and gradient; outlives the parameter's use
};

// The type of the value in a model of this type.
inline at::ScalarType value_type(const Parameter& parameter, at::ScalarType model) {
  const bool narrow = model == at::kBFloat16 || model == at::kHalf;
  return parameter.keeps_fp32 && narrow ? at::kFloat : model;
}

// Where and how a weight gradient is accumulated: tensor = beta * tensor + gradient. Beta is 0 or
// 1; 0 assigns, whatever the tensor holds.
struct GradTarget {
  at::Tensor tensor;  // shaped like value; fp32 (fp64 for fp64 models)
  double beta = 1.0;

  // The tensor, zeroed first if beta is 0, for a computation that can only add.
  at::Tensor to_add_to() const;
};

// Owns weights and gradients. Layers do not know how they are stored or reduced: the interface is
// declared here and implemented by PlainParameterStore and in distributed/.
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;
  // The value to compute with (gathered under full sharding). The layer must release it after use.
  virtual at::Tensor acquire(Parameter& parameter) = 0;
  virtual void release(Parameter& parameter) = 0;
  virtual GradTarget grad_target(Parameter& parameter) = 0;
  // Reports that the gradient of one use is complete.
  virtual void grad_ready(Parameter& parameter) = 0;
  // Changes whenever a value does: what was derived from a value is valid while it stays the same.
  // -1: not known, or values are not kept between uses.
  virtual int64_t values_version() const { return -1; }
  // Whether collectives are issued while values are used or gradients become ready: then all ranks
  // must use the same parameters in each pass, in the same order.
  virtual bool communicates_in_passes() const { return false; }
  // Whether weights are used by forwards alone: of a quantised weight only the copy that these read
  // is made.
  virtual bool only_forward() const { return false; }
  // The copies of a quantised weight are complete: products do not read its value again before it
  // changes. `copies` stay where they are as long as the layer lives.
  virtual void quantized(Parameter& /*weight*/, QuantizedTensor& /*copies*/) {}
  // The delayed scales of a weight with `delayed_scaling`; null: none are kept, and tensors are
  // scaled by their current amax.
  virtual const DelayedScales* delayed_scales(const Parameter& /*weight*/) { return nullptr; }
  // Takes over a weight gradient computation to run it after this backward (zero-bubble schedules
  // run it as a separate action), or returns false: the caller runs it now.
  virtual bool defer(std::function<void()> /*weight_gradient*/) { return false; }
  // Whether defer() currently takes computations.
  virtual bool defers() const { return false; }
};

}  // namespace megatron
