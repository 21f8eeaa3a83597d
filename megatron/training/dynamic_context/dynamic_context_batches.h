// Micro-batches of a rank with dynamic context parallelism, where every document has its own
// context-parallel size (--hybrid-context-parallel).
//
// The documents of all sequences of a step are distributed over the ranks of dp x cp by
// dynamic_context_plan.h; short neighbours in one sequence stay together if they fit on one rank.
// Each becomes a micro-batch of one row, split over its ranks by zig-zag, with its positions in the
// sequence. Ranks run different numbers of micro-batches; losses and gradients are sums, divided
// once by the weight of all tokens.
#pragma once

#include <memory>
#include <vector>

#include "megatron/training/arguments/arguments.h"
#include "megatron/training/batch.h"
#include "megatron/training/dynamic_context/dynamic_context_plan.h"

namespace megatron {

// Not thread safe. Keeps a reference to the groups.
class DynamicContextBatches {
 public:
  // `loader` must return all sequences of a step on every rank.
  DynamicContextBatches(const Arguments& arguments, const ParallelGroups& groups,
                        std::unique_ptr<DataLoader> loader, c10::Device device);

  // Reads the sequences of the next step and plans it. Returns the number of micro-batches of this
  // rank, at least 1: a rank without documents runs one whose tokens have weight 0. Throws Error if
  // there are no samples left.
  int64_t begin_step(int64_t global_batch_size);
  // The next micro-batch of this rank.
  Batch next();
  const DynamicContextPlan& plan() const { return plan_; }

 private:
  // Neighbouring documents of one sequence that are computed together.
  struct Piece {
    std::shared_ptr<const MicroBatch> source;
    int64_t row, begin, length;
  };
  SequenceTotals totals_of(const Piece& piece) const;
  // The piece's part of a column on this rank of `cp`, lengthened to `length`.
  at::Tensor column(const Piece& piece, size_t i, int64_t length, const ProcessGroup& cp) const;
  void cut(const std::shared_ptr<const MicroBatch>& source, int64_t row);
  Batch empty_pass() const;

  const int64_t micro_batch_size_, alignment_;
  const DynamicContextOptions options_;
  const ParallelGroups& groups_;
  const ProcessGroup alone_;  // group of documents on one rank
  const c10::Device device_;
  std::unique_ptr<DataLoader> loader_;
  std::vector<Piece> pieces_;
  DynamicContextPlan plan_;
  std::vector<PlacedDocument> own_;  // documents of this rank
  size_t next_ = 0;
};

}  // namespace megatron
