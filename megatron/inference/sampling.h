// Draws the next tokens of sequences from logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/comm/process_group.h"
#include "megatron/scheduling/step_plan.h"
#include "megatron/tensor/decoding/sampling.h"

namespace megatron {

// Flags of sampling; the defaults sample from the unmodified distribution.
struct SamplingConfig : Config {
  bool greedy = false;
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all tokens
  double top_p = 0.0;        // 0: all tokens
  int64_t seed = 1234;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  SamplingParameters parameters() const;
};

// Log-probabilities of rows in one fp64 tensor, for one copy to the host: for each row that of the
// chosen token, then the values and the ids of the top ones.
class LogProbabilityReport {
 public:
  LogProbabilityReport() = default;
  // `tops`: how many of the top ones each row wants.
  explicit LogProbabilityReport(std::vector<int32_t> tops);

  int64_t rows() const { return static_cast<int64_t>(tops_.size()); }
  int64_t most() const { return most_; }  // of the top ones, over all rows
  int64_t size() const { return rows() * (1 + 2 * most_); }
  static at::Tensor pack(const LogProbabilities& values);  // [size()]
  // `from`: what pack() gave, on the host.
  PositionLogProbabilities read(const double* from, int64_t row, int32_t chosen) const;

 private:
  std::vector<int32_t> tops_;
  int64_t most_ = 0;
};

// The draws of a step as numbers, for one copy to the host.
class DrawReport {
 public:
  DrawReport() = default;
  // The sequence of each draw, in order.
  DrawReport(std::vector<int32_t> slots, const std::vector<LogProbabilityWishes>& wishes);

  int64_t size() const;
  std::vector<DrawnToken> read(const double* from) const;

 private:
  friend class TokenSampler;
  std::vector<int32_t> slots_;
  std::vector<int64_t> raw_rows_, drawn_rows_;  // those with log-probabilities, of either kind
  LogProbabilityReport raw_, drawn_;
};

// The drawing parameters of sequences by slot, and for those with penalties counts of their ids. A
// token depends on its logits, on seed, choice and position, and on the sequence's own ids: not on
// its slot nor on other sequences.
class TokenSampler {
 public:
  // Rows of logits have `columns` columns on each rank of `tp`, padding included.
  TokenSampler(int64_t vocab_size, int64_t columns, ProcessGroup tp, at::Device device);

  // A sequence gets the slot. Its ids are those that are known so far.
  void start(const SlotStart& start);
  void release(int32_t slot);

  struct Row {
    int32_t slot = 0;
    int64_t position = 0;                 // of the token that is drawn
    std::span<const uint32_t> mask = {};  // allowed ids: bit id % 32 of word id / 32; empty: all
    // Ids between those that are known and this token. The row before, of the same slot, has all of
    // them but the last; this row counts if each equals what was drawn for its place.
    std::span<const int32_t> drafts = {};
  };
  struct Draws {
    at::Tensor ids;              // [rows] int64; 0 where no token could be drawn
    at::Tensor numbers;          // fp64: these ids, then the report
    at::Tensor report() const {  // [DrawReport::size()]
      return numbers.narrow(0, ids.size(0), numbers.size(0) - ids.size(0));
    }
  };
  // logits [rows, columns]; everything stays on their device.
  //
  // Communication: over tp; as many calls on every rank.
  Draws draw(const at::Tensor& logits, std::span<const Row> rows, const DrawReport& report);

  // Log-probabilities of given next tokens and of the `top` largest by the model's own logits, as
  // LogProbabilityReport::pack() arranges them.
  at::Tensor score(const at::Tensor& logits, const std::vector<int32_t>& targets,
                   int64_t top) const;

 private:
  struct Slot {
    SamplingRow how;
    int64_t first_end = 0;  // the first position at which `ends` may be drawn
    std::vector<int32_t> edit_ids, ends;
    std::vector<float> edit_values;
  };
  SamplingBatch batch_of(std::span<const Row> rows) const;
  int32_t take_counts();  // a row of counts_
  int32_t count_ids(const SlotStart& start);
  // Rows with drafts count their ids in rows of counts_ of their own.
  struct DraftedCounts {
    int32_t own = 0;                 // the row of the sequence
    int64_t first = 0;               // of its rows in the batch
    std::vector<int32_t> rows = {};  // by row of the batch
    std::vector<int32_t> drafts = {};
  };
  std::vector<DraftedCounts> count_drafts(std::span<const Row> rows, SamplingBatch& batch);
  void keep_counts(const std::vector<DraftedCounts>& drafted, const at::Tensor& ids);

  int64_t vocab_size_, first_id_, columns_;  // valid columns of this rank
  ProcessGroup tp_;
  at::Device device_;
  std::unordered_map<int32_t, Slot> slots_;
  at::Tensor counts_;  // [.., valid columns on this rank], see kernels/sampling.h
  std::vector<int32_t> free_counts_;
};

}  // namespace megatron
