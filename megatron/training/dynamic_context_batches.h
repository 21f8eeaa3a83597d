// The passes of a rank when every document has a context width of its own
// (--hybrid-context-parallel).
//
// The documents of all sequences of a step are divided over the ranks of dp x cp by
// dynamic_context_plan.h; neighbours in one sequence that are short together stay together. Each
// becomes one pass of one row, cut over its ranks by zig-zag, with the positions that it has in its
// sequence. Ranks run different numbers of passes; their losses and gradients are sums, which one
// division by the weight of all tokens makes a mean.
#pragma once

#include <memory>
#include <vector>

#include "megatron/training/arguments/arguments.h"
#include "megatron/training/batch.h"
#include "megatron/training/dynamic_context_plan.h"

namespace megatron {

// Not thread safe. Keeps a reference to the groups.
class DynamicContextBatches {
 public:
  // `loader` gives every rank all sequences of a step.
  DynamicContextBatches(const Arguments& arguments, const ParallelGroups& groups,
                        std::unique_ptr<DataLoader> loader, c10::Device device);

  // Reads the sequences of the next step and plans it. Returns the number of passes of this rank,
  // at least 1: a rank without documents runs one whose tokens have no weight. Throws Error when
  // the samples are used up.
  int64_t begin_step(int64_t global_batch_size);
  // The passes in order.
  Batch next();
  const DynamicContextPlan& plan() const { return plan_; }

 private:
  // Neighbouring documents of one sequence that are computed together.
  struct Piece {
    std::shared_ptr<const MicroBatch> source;
    int64_t row, begin, length;
  };
  void cut(const std::shared_ptr<const MicroBatch>& source, int64_t row);
  Batch empty_pass() const;

  const int64_t micro_batch_size_, alignment_;
  const bool own_positions_;
  const DynamicContextOptions options_;
  const ParallelGroups& groups_;
  const ProcessGroup alone_;  // of documents on one rank
  const c10::Device device_;
  std::unique_ptr<DataLoader> loader_;
  std::vector<Piece> pieces_;
  DynamicContextPlan plan_;
  std::vector<PlacedDocument> own_;  // of this rank
  size_t next_ = 0;
};

}  // namespace megatron
