// A parameter: its value, where it lies in the mesh, how it starts, and who owns its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "megatron/tensor/quantization_options.h"

namespace megatron {

// kModel: tensor ranks of all stages, those of one stage being neighbours.
enum class Axis : uint8_t { kTensor, kContext, kData, kPipeline, kExpert, kExpertTensor, kModel };

// A set of mesh axes.
struct AxisSet {
  uint32_t bits = 0;
  void insert(Axis axis) { bits |= 1u << static_cast<int>(axis); }
  bool contains(Axis axis) const { return (bits >> static_cast<int>(axis)) & 1u; }
};

// `dim` is split over `axis`; `parts` are the sizes of the pieces that are split one by one (a
// gated FC1 is {ffn, ffn}); empty: one piece.
struct Shard {
  int dim = 0;
  Axis axis = Axis::kTensor;
  std::vector<int64_t> parts;
};

// Placement is data; reductions are derived from it. See Note [Placement] in nn/placement.cc.
struct Placement {
  std::vector<Shard> shards;  // none: whole on every rank
  AxisSet partial_grad;       // axes over which a rank's gradient is only a partial sum
  bool expert = false;        // replicated over expert-data ranks instead of data ranks
};

// How a parameter starts (contracts f). Draws are by place: by index in the global unpadded tensor.
struct Init {
  enum class Kind : uint8_t { kZero, kOne, kNormal, kUniform };
  Kind kind = Kind::kZero;
  double std = 0.0;  // kNormal: the standard deviation; kUniform: the bound
  static Init zero() { return {}; }
  static Init one() { return {Kind::kOne, 0.0}; }
  static Init normal(double std) { return {Kind::kNormal, std}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
};

// What the optimizer may treat differently.
enum class ParameterRole : uint8_t { kWeight, kBias, kNorm, kQKNorm, kEmbedding, kOutput };

class ParameterStore;
class ProcessGroup;

struct Parameter {
  std::string name;  // full logical name, "decoder.layers.3.mlp.linear_fc1.weight"; set by
                     // Module::name_parameters
  at::Tensor
      value;  // this rank's shard in the model's type; undefined until a store has allocated it
  std::vector<int64_t> local_shape;   // of value
  std::vector<int64_t> global_shape;  // of the logical tensor, with vocabulary padding
  int64_t valid_rows =
      -1;  // rows of the global tensor without vocabulary padding; -1: all. Padded rows stay zero
  Placement placement;
  Init init;
  ParameterRole role = ParameterRole::kWeight;
  bool trainable = true;
  // The stages that hold copies of it (a tied embedding over pipeline stages), or null. Copies have
  // one name and one start; their gradients are summed over this group before any other reduction,
  // and the first of them counts and is stored.
  const ProcessGroup* shared = nullptr;
  // Set where the products with this weight have delayed scales, which its store keeps.
  std::optional<DelayedScalingOptions> delayed_scaling = {};
  int uses = 1;                     // how often one pass uses it: 2 for a tied embedding
  ParameterStore* store = nullptr;  // owner of value and gradient; outlives the parameter's use
};

// Where and how a weight gradient is accumulated: tensor = beta * tensor + gradient. Beta is 0 or
// 1; 0 assigns, whatever the tensor holds.
struct GradTarget {
  at::Tensor tensor;  // as value, fp32 (fp64 for fp64 models)
  double beta = 1.0;

  // The tensor for a computation that can only add.
  at::Tensor to_add_to() const;
};

// Owns weights and gradients. Layers do not know how: declared here, implemented by
// PlainParameterStore and distributed/.
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;
  // The value to compute with (gathered under full sharding); to be released by the layer when its
  // pass is over.
  virtual at::Tensor acquire(Parameter& parameter) = 0;
  virtual void release(Parameter& parameter) = 0;
  virtual GradTarget grad_target(Parameter& parameter) = 0;
  // The gradient of one use is complete.
  virtual void grad_ready(Parameter& parameter) = 0;
  // Changes whenever a value does: what was made from a value may be used while it stays. -1: not
  // known, or values come and go.
  virtual int64_t values_version() const { return -1; }
  // The delayed scales around a weight with `delayed_scaling`; null: none are kept, and tensors are
  // scaled by their own values.
  virtual const DelayedScales* delayed_scales(const Parameter& /*weight*/) { return nullptr; }
  // Takes the computation of a weight gradient to run it after this backward (zero-bubble schedules
  // run it as an action of its own), or returns false: run it now.
  virtual bool defer(std::function<void()> /*weight_gradient*/) { return false; }
  // Whether it does so now.
  virtual bool defers() const { return false; }
};

}  // namespace megatron
