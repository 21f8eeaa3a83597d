// Embedding table whose rows are split over the tensor-parallel group.
#pragma once

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/module.h"

namespace megatron {

// An id that no data has by mistake.
inline constexpr int64_t kNoToken = -(int64_t{1} << 62);

// Rank r owns rows [r v'/t, (r+1) v'/t) of the padded table; ids of other ranks give zero rows
// before the sum. kNoToken looks nothing up: its row is zero on every rank.
//
//   ids     [b, s] int64
//   return  [s, b, h]   ([s/t, b, h] with sequence_parallel)
//   weight  [v'/t, h]   shards: dim 0 over kTensor; rows from vocab_size on are padding and stay
//   zero
//
// Communication: forward all-reduce (reduce-scatter with sequence_parallel); backward none
// (all-gather).
class VocabParallelEmbedding : public Module {
 public:
  VocabParallelEmbedding(int64_t vocab_size, int64_t padded_vocab_size, int64_t hidden_size,
                         Init init, bool sequence_parallel, const ParallelGroups& groups);
  // Looks up in the table of another module, which must outlive this one.
  VocabParallelEmbedding(Parameter& table, bool sequence_parallel, const ParallelGroups& groups);
  at::Tensor forward(const at::Tensor& ids);
  Parameter& weight() { return *table_; }

 private:
  Parameter weight_;  // unless the table is another module's
  Parameter* table_ = &weight_;
  bool sequence_parallel_;
  const ProcessGroup& tp_;
  std::shared_ptr<PeerMailbox> mailbox_;
};

// A plain table, replicated on every rank (learned positions): ids [...] -> [..., h]. Parameter:
// weight.
class Embedding : public Module {
 public:
  Embedding(int64_t rows, int64_t hidden_size, Init init);
  // Looks up in the table of another module, which must outlive this one.
  explicit Embedding(Parameter& table) : table_(&table) {}
  // Each tensor rank looks up its part of the sequence: gradients are partial sums over kTensor.
  void set_sequence_parallel(bool sequence_parallel);
  at::Tensor forward(const at::Tensor& ids);
  Parameter& weight() { return *table_; }

 private:
  Parameter weight_;  // unless the table is another module's
  Parameter* table_ = &weight_;
};

}  // namespace megatron
