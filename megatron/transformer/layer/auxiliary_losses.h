// Losses besides the main one (load balance of experts, further heads), which any layer of any
// pipeline stage may add to during a forward.
//
// Like the main loss, one is a pair (sum, weight). What is trained is the total of all sums,
// divided once by the weight of the main loss: it does not depend on micro-batches or ranks as long
// as each sum is a sum over tokens (or samples) of terms that do not. A coefficient is part of the
// sum. With --no-calculate-per-token-loss each micro-batch's sums are divided by their own weights,
// as its main loss is, and the step divides by the number of micro-batches. A log shows sum /
// weight of all micro-batches and ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

class RecomputeTape;

// The rows that a pair covers, where --sequence-parallel divides them over tensor ranks.
enum class LossRows {
  kOwn,  // those of this rank: pairs of the tensor ranks are added
  kAll,  // those of all tensor ranks, each of which computed the same
};

// What --no-calculate-per-token-loss divides a micro-batch's sum by.
enum class LossDivision {
  kOwnWeight,  // the sum of its weights over the micro-batch's ranks
  kNone,       // nothing: it is a sum with the weights of ForwardContext::tokens
};

class AuxiliaryLosses {
 public:
  struct Options {
    bool per_token = true;           // the step divides by the weight of the main loss
    std::vector<std::string> names;  // that may be added
    at::Tensor totals;               // [names, 2] fp64: (sum, weight), to which pairs are added
    bool counts_all_rows = true;     // whether this rank adds LossRows::kAll to the totals
    // The gradient of a sum, in its type: []. Undefined weight: LossDivision::kNone
    std::function<at::Tensor(const at::Tensor& sum, const at::Tensor& weight, LossRows rows,
                             std::string_view name)>
        gradient;
  };
  // Records the roots of the backward on `tape`, which must outlive it.
  AuxiliaryLosses(Options options, RecomputeTape& tape)
      : options_(std::move(options)), tape_(&tape) {}

  // Adds a loss; several of one name (of several layers) are summed.
  //   sum     [] fp32 (fp64), differentiable
  //   weight  [] fp32 (fp64)
  // Inside a part that is recomputed, the pair counts when it is first computed, and the gradient
  // flows when it is computed again. Throws InternalError for a name that the model does not
  // declare (Model::auxiliary_losses()).
  //
  // Communication: with --no-calculate-per-token-loss, the weight over the micro-batch's ranks.
  void add(std::string_view name, const at::Tensor& sum, const at::Tensor& weight,
           LossRows rows = LossRows::kOwn, LossDivision division = LossDivision::kOwnWeight);
  // Its two halves, for a loss that is logged without its coefficient, or a number that is only
  // logged: train() has the gradient, log() the totals. A name is needed where the task has weights
  // of its own for the loss.
  void train(const at::Tensor& sum, const at::Tensor& weight, LossRows rows = LossRows::kOwn,
             LossDivision division = LossDivision::kOwnWeight, std::string_view name = {});
  void log(std::string_view name, const at::Tensor& sum, const at::Tensor& weight,
           LossRows rows = LossRows::kOwn);
  // False with --no-calculate-per-token-loss: a sum is divided by its own weight.
  bool per_token() const { return options_.per_token; }

 private:
  Options options_;
  RecomputeTape* tape_;
};

}  // namespace megatron
