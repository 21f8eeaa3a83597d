// What the stores of a rank hold for a while next to their buffers, from one use of a parameter to
// the next: weights that are gathered for a unit and, in advance, for the unit after it; buckets of
// gradients from the first gradient in them to the end of their reduction. The order is that of
// distributed/value_buffer.h and distributed/grad_buffer.h.
//
// The moments of a pass through a chunk: 0 is what comes before its layers, 1 to n are its n
// layers, n + 1 is what follows them, n + 2 the output layer. Where the vocabulary is split over
// the stages the output layer has passes of its own, of the moment n + 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "megatron/training/planning/activation_estimate.h"
#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct PassingBytes {
  int64_t weights = 0, gradients = 0;
  int64_t total() const { return weights + gradients; }
};

// Which gradients a pass computes: the pass I of a zero-bubble schedule leaves those of matrices
// to W.
enum class GradientPass : uint8_t { kWhole, kInput, kWeight };

class ShardedStores {
 public:
  // `passes`: of the chunks of the stage.
  ShardedStores(const LayoutPlan& plan, int stage, const std::vector<PassBytes>& passes);
  ~ShardedStores();

  // Between steps nothing is held.
  void begin_step();
  // Forwards of another kind of data, twice in a row.
  void evaluate();
  // What all stores hold at most while a chunk runs a moment of a forward or of a backward.
  PassingBytes forward(int chunk, size_t moment);
  PassingBytes backward(int chunk, size_t moment, GradientPass pass = GradientPass::kWhole);

 private:
  struct Use;
  class Domain;
  class Held;

  const std::vector<Use>& uses_at(int chunk, size_t moment) const {
    return uses_[static_cast<size_t>(chunk)][moment];
  }

  const int64_t num_microbatches_;
  std::unique_ptr<Held> held_;
  std::vector<std::vector<std::unique_ptr<Domain>>> domains_;  // by chunk
  std::vector<std::vector<std::vector<Use>>> uses_;  // by chunk and moment, as a forward uses them
};

}  // namespace megatron
