// The MLPs of the experts of one rank, on rows that lie by expert:
//
//   u = x W1_e^T + b1_e      y = (weight * act(u)) W2_e^T + weight * b2_e
//
// A row's weight multiplies what enters the second product, so that the weight's gradient follows
// from that product's input gradient and its output is not kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/experts/weighted_activation.h"
#include "megatron/transformer/moe/expert_linear.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

struct GroupedMlpOptions {
  int64_t num_experts = 1;
  int64_t input_size = 0;
  int64_t ffn_size = 0;  // of one expert
  ExpertActivation activation = {};
  bool bias = false;  // not with several expert-tensor ranks
  Init fc1_init, fc2_init;
  bool recompute_activation = false;  // save only its input
  // FP8 operands of the products. h and, on a rank, F and f must be multiples of its alignment().
  QuantizationOptions quantization = {};
};

// What a forward over some rows leaves for their backward.
struct GroupedMlpRows {
  at::Tensor x;        // [n, h]
  at::Tensor weights;  // [n] fp32 (fp64)
  at::Tensor fc1;      // [n, F/x]
  // [n, f/x]: the second product's input, of quantised products as its weight gradient takes it;
  // undefined: recomputed.
  ExpertOperand activation;

  // As tensors, some undefined, and back.
  std::vector<at::Tensor> tensors() const;
  static GroupedMlpRows of(const std::vector<at::Tensor>& tensors);
};

class GroupedMlp {
 public:
  // Throws Error if the sizes do not divide.
  GroupedMlp(const GroupedMlpOptions& options, const ParallelGroups& groups);

  // Shapes are global; [E/e, F/x, h] and so on on a rank. F = 2f when gated, [gate | up].
  Parameter fc1_weight;  // [E, F, h]   shards: dim 0 over kExpert, dim 1 over kExpertTensor
  Parameter fc1_bias;    // [E, F]      shards: dim 0 over kExpert
  Parameter fc2_weight;  // [E, h, f]   shards: dim 0 over kExpert, dim 2 over kExpertTensor
  Parameter fc2_bias;    // [E, h]      shards: dim 0 over kExpert
  bool has_bias() const { return options_.bias; }
  // Whether the store takes weight gradients to compute them later.
  bool defers_gradients() const { return fc1_weight.store->defers(); }

  // The values of the parameters during one forward or backward.
  class Values {
   public:
    // All ranks take them in the same order, whatever rows they have.
    Values(GroupedMlp& mlp, bool backward);

   private:
    friend class GroupedMlp;
    std::optional<AcquiredValue> fc1_weight_, fc1_bias_, fc2_weight_, fc2_bias_;
  };

  // The gradients of the parameters from the rows of one or more rounds.
  class Gradients {
   public:
    Gradients(GroupedMlp& mlp, int64_t rounds) : mlp_(mlp), rounds_(rounds) {}

   private:
    friend class GroupedMlp;
    struct Sum {
      Parameter* parameter;
      std::optional<GradTarget> target = {};
      int64_t rounds = 0;
    };
    void add(Sum& sum, std::function<void(const GradTarget&)> accumulate) const;

    GroupedMlp& mlp_;
    const int64_t rounds_;
    Sum fc1_weight_{&mlp_.fc1_weight}, fc1_bias_{&mlp_.fc1_bias}, fc2_weight_{&mlp_.fc2_weight},
        fc2_bias_{&mlp_.fc2_bias};
  };

  // y [n, h]; several expert-tensor ranks: this rank's part of the sum. Takes rows.x and
  // rows.weights and fills the rest.
  at::Tensor forward(const Values& values, const ExpertCounts& counts, GroupedMlpRows& rows) const;
  // The same without y.
  void forward_fc1(const Values& values, const ExpertCounts& counts, GroupedMlpRows& rows) const;
  // The gradients of x and of the weights, parts like y. What remains are those of the parameters
  // of FC2, `rows.meanwhile`, and of FC1, `fc1`.
  struct Backward {
    ExpertRows rows;
    std::function<void()> fc1;
  };
  Backward backward(const Values& values, const at::Tensor& dy, const ExpertCounts& counts,
                    const GroupedMlpRows& rows, const std::shared_ptr<Gradients>& gradients) const;

 private:
  at::Tensor fc2_output(const Values& values, const ExpertCounts& counts,
                        const GroupedMlpRows& rows, const ExpertOperand& activation) const;

  const GroupedMlpOptions options_;
  const ExpertLinear fc1_, fc2_;
};

}  // namespace megatron
