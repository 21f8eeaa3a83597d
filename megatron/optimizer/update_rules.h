// The update rules, as one table: what the optimizer keeps for every weight, and how a step changes
// the weight.
//
// A new rule is one file like adam.cc, its line in update_rules.cc, and its flags. Steps,
// checkpoints, buffers and plans read the row; nobody else asks which rule a run uses.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/optimizer/optimizer_config.h"
#include "megatron/tensor/optimizer_ops.h"

namespace megatron {

// A logical matrix, [rows, columns], whole on this rank. What the update writes to master and
// states is kept.
struct MatrixUpdate {
  at::Tensor grad;                 // fp32 or fp64; StepState::grad_factor scales it
  at::Tensor master;               // as grad
  std::vector<at::Tensor> states;  // as grad
  int lr_group = 0;                // index into StepState::lr, which lr_factor multiplies
  double lr_factor = 1.0;
  float weight_decay_mult = 0.0f;  // times StepState::weight_decay
};

// How a rule updates a parameter: element by element, or as a whole matrix.
enum class UpdateKind : uint8_t { kElementwise, kMatrix };

struct UpdateRule {
  // A tensor with one element for each weight.
  struct State {
    std::string_view name;                        // stored as optimizer.state.NAME.<parameter>
    StateType OptimizerConfig::* type = nullptr;  // the flag with its type; null: always fp32
  };

  std::string_view name;       // as --optimizer spells it
  std::vector<State> states;   // of a parameter that update() updates; at the start zeros
  bool narrow_states = false;  // supports --use-precision-aware-optimizer

  // Updates the blocks of flat tensors: master weights, states and values. `record` is the
  // StepState on their device; nothing changes if it says skip.
  void (*update)(const OptimizerConfig& config, FlatUpdate& flat, const at::Tensor& record);

  // Null: the rule is elementwise. Otherwise matrices of linears (is_hidden_matrix()) are updated
  // by this and only the other parameters by update(). No shard border then cuts a matrix
  // (DistributedDataParallelConfig::whole_matrices), and one that tensor ranks divide is gathered
  // before the update. Not with --optimizer-cpu-offload.
  void (*update_matrix)(const OptimizerConfig& config, MatrixUpdate& matrix,
                        const at::Tensor& record) = nullptr;
  std::vector<State> matrix_states = {};  // of a matrix that update_matrix() updates; zeros
  bool needs_whole_matrices() const { return update_matrix != nullptr; }

  // For comparisons of layouts (`prove`), which train a tiny model for a few steps: a learning rate
  // that moves its weights, and a change of settings after which rounding errors of the gradients
  // stay rounding errors of the weights. It returns what it changed, "--adam-eps 1e-08 -> 1e-05",
  // or nothing. Null: the rule needs none.
  double few_steps_lr = 1e-2;
  std::string (*bound_rounding)(OptimizerConfig& config) = nullptr;

  UpdateKind kind_of(bool hidden_matrix) const {
    return hidden_matrix && needs_whole_matrices() ? UpdateKind::kMatrix : UpdateKind::kElementwise;
  }
};

// In the order in which --optimizer lists them.
const std::vector<const UpdateRule*>& update_rules();
// The rule of config.optimizer. Throws UsageError for a name that the table does not have.
const UpdateRule& update_rule(const OptimizerConfig& config);

// A tensor that the optimizer keeps beside the values, with one element for each trained weight.
struct OptimizerState {
  std::string_view name;  // in checkpoint keys
  StateType type = StateType::kFp32;
  int64_t bytes() const { return type == StateType::kFp32 ? 4 : 2; }  // of an element
};

// Whether master weights are kept beside the values. `half_model`: the model is in bf16 or fp16.
bool keeps_masters(const OptimizerConfig& config, bool half_model);
// All of them for parameters of a kind, in the order in which checkpoints store them: master
// weights if they are kept, then the states of the rule. Those of models in fp64 are fp64 instead
// of fp32.
std::vector<OptimizerState> optimizer_states(const UpdateRule& rule, const OptimizerConfig& config,
                                             bool half_model,
                                             UpdateKind kind = UpdateKind::kElementwise);
// Bytes of optimizer_states(), for one trained weight; of the configured rule if none is given.
int64_t optimizer_state_bytes(const UpdateRule& rule, const OptimizerConfig& config,
                              bool half_model, UpdateKind kind);
int64_t optimizer_state_bytes(const OptimizerConfig& config, bool half_model,
                              UpdateKind kind = UpdateKind::kElementwise);

}  // namespace megatron
