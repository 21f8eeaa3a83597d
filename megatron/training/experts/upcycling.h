// Starts a model with experts from a dense checkpoint (arXiv:2212.05055; with several parts of an
// MLP, arXiv:2410.07524).
//
// With granularity G expert j is part j mod G of the dense MLP: of FC1 the part's rows of the gate
// and of up, of FC2 its columns. The rows of a new router come in runs of G equal ones, so that the
// parts of one copy of the MLP have equal scores. FC1 and FC2 are multiplied by scale(), which
// keeps the size of the layer's output.
#pragma once

#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/transformer/moe/upcycled_experts.h"

namespace megatron {

class Upcycling {
 public:
  Upcycling(const TransformerConfig& config, int64_t granularity);

  // The cube root (ungated activations of degree 1: the square root) of what the weights of a
  // token's experts divide the dense output by: G; with --moe-router-pre-softmax E G / k.
  double scale() const { return experts_.scale; }

  // Makes the tensors of experts descriptions of what they read of the dense model's checkpoint,
  // and removes those that it does not have: routers and their biases.
  void redirect(std::vector<StateTensor>& tensors) const;

  // After they have been read: initialises routers, and scales experts. Collective.
  void complete(DistributedDataParallel& store) const;

 private:
  ShardedTensor dense_part(const ShardedTensor& experts) const;

  int64_t granularity_;
  UpcycledExperts experts_;
};

}  // namespace megatron
