// Attention over a paged cache: rows of several sequences, one after another (a ragged batch),
// whose keys and values lie in blocks of one pool.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/decoding/state_buffer.h"

namespace megatron {

// Consecutive tokens of one sequence in a ragged batch of t rows.
struct RaggedPart {
  int64_t first = 0;  // position of the first of them in its sequence
  int64_t count = 0;  // at least 1
  // Those of all positions up to the last, in order. Leading ones that no layer reads may be
  // negative: there is no block.
  std::vector<int32_t> blocks;
  // Positions of the sequence that are known, of a chunk of a prompt those behind it as well; 0:
  // first + count. See PagedRows::last.
  int64_t known = 0;
  // [count]: so many leading positions each of them attends to, its own included and later ones of
  // the part too; empty: those up to its own
  std::vector<int64_t> ends = {};
};

// Where the rows of a ragged batch lie in the pool. Parts of one token come first.
class PagedRows {
 public:
  // A pool of `blocks` blocks of `block_size` positions. Tensors are made on `device`.
  PagedRows(std::vector<RaggedPart> parts, int64_t blocks, int64_t block_size, at::Device device);
  // Rows of one token each, on a GPU, whose numbers are written to these tensors later: work on
  // them can be captured in a graph. A row with a negative slot and a length of 0 writes and
  // attends to nothing. Shapes as below.
  struct Numbers {
    at::Tensor slots, positions, last, lengths, block_table;
    bool has_runs = false;
  };
  PagedRows(Numbers numbers, int64_t blocks, int64_t block_size);

  const std::vector<RaggedPart>& parts() const { return parts_; }
  int64_t rows() const { return slots.size(0); }  // t
  int64_t single() const { return single_; }      // leading parts of one token
  // Whether parts of one token are mostly positions behind each other of few texts, whose attention
  // then reads keys once for several of them.
  bool has_runs() const { return has_runs_; }
  // Whether so many of these rows that go on where the one before ends are that.
  static bool are_runs(int64_t going_on, int64_t rows);
  // The parts of several tokens, and the positions that some row of each sees, for attention with
  // this window (AttentionOptions::window_left). Made once for all layers.
  struct Chunks {
    at::Tensor places;                // [keys] int64: block * block_size + offset, part by part
    at::Tensor query_ends, key_ends;  // [parts + 1] int32: rows and keys of the parts before
    int64_t most_queries = 0, most_keys = 0;  // of a part
    // The parts behind the last one that goes on with a text begin theirs: samples whose rows begin
    // at these offsets [b + 1] int32 behind `rows_going_on`, so many of each [b] int32, at most
    // `most_of_sample`. Both numbers are rounded up, by samples without rows, to such of which
    // there are few, since cuDNN needs a plan for each. Undefined: that is not worth it.
    at::Tensor sample_offsets, sample_counts;
    int64_t most_of_sample = 0;
    int64_t parts_going_on = 0, rows_going_on = 0, keys_going_on = 0;  // the parts before those
  };
  const Chunks& chunks(int64_t window_left) const;
  // The same rows for a kernel that takes at most `most` consecutive ones of a part at once. Throws
  // Error if a part's rows see other positions than those up to their own.
  struct Spans {
    at::Tensor block_table;  // [parts, most blocks] int32
    at::Tensor spans;        // [spans, 4] int32: row of the table, first row, rows, position
  };
  const Spans& spans(int64_t most) const;
  int64_t pool_blocks() const { return blocks_; }
  int64_t block_size() const { return block_size_; }

  at::Tensor slots;        // [t] int64: block * block_size + offset of a row's own position
  at::Tensor positions;    // [t] int64
  at::Tensor last;         // [t] int64: the last position of the row's sequence that is known
  at::Tensor last_rows;    // [parts] int64: the last row of each part
  at::Tensor sequences;    // [single] int32: 0, 1, ...
  at::Tensor lengths;      // [single] int32: positions that a row sees, its own included
  at::Tensor block_table;  // [single, most blocks] int32

 private:
  // What of Chunks is of samples; the rows and keys of the parts before each.
  void add_samples(Chunks& chunks, const std::vector<int32_t>& query_ends,
                   const std::vector<int32_t>& key_ends) const;

  std::vector<RaggedPart> parts_;
  int64_t blocks_, block_size_, single_ = 0;
  bool has_runs_ = false;
  mutable std::map<int64_t, Chunks> chunks_;  // by window
  mutable std::map<int64_t, Spans> spans_;    // by most rows
};

// A pool as attention reads it.
struct PagedView {
  at::Tensor pool;  // [blocks, block_size, g, d]; any strides with a contiguous last dimension
  // [g] fp32: the pool holds codes of E4M3, as bytes, which are multiplied by this; undefined: it
  // holds values of the queries' type
  at::Tensor scale = {};
};

// Rows [blocks, block_size, g, d] of a pool, in the type of the first rows written to it, or in FP8
// (E4M3) with a scale per head.
class PagedBuffer final : public StateBuffer {
 public:
  // Writes values [t, g, d] to the slots of their rows. The pool is allocated by the first call,
  // and enlarged when that of `rows` has more blocks. Values beyond the range of FP8 saturate.
  void write(const PagedRows& rows, const at::Tensor& values);
  // What write() does but for the writing: `values` may have any strides. The pool is data().
  void hold(const PagedRows& rows, const at::Tensor& values);
  // Positions [from, first + count) of a part, [positions, g, d] in the type of what was written: a
  // copy.
  at::Tensor gather(const PagedRows& rows, const RaggedPart& part, int64_t from = 0) const;
  PagedView view() const { return {data_, scale_}; }

  // From now on write() notes the largest values of each head.
  void measure();
  bool is_measuring() const { return measuring_; }
  // Ends measure() and what was written: the pool holds FP8 from now on, whose range is `room`
  // times those values. Nothing else changes the scales.
  void quantize(double room);
  const at::Tensor& scale() const { return scale_; }

 private:
  at::Tensor values_of(const at::Tensor& found) const;  // of codes, else what they are

  bool measuring_ = false;
  at::Tensor amax_;   // [g] fp32: what was measured
  at::Tensor scale_;  // [g] fp32; undefined: not quantised
  at::ScalarType type_ = at::kFloat;
};

// What a batch's rows add to a cache, features contiguous.
struct AddedRows {
  at::Tensor q;              // [t, g, heads of a group, d]
  at::Tensor k, v;           // [t, g, d], [t, g, v]
  RotaryAngles angles = {};  // rotate q and k: [t, 1, r]; undefined: nothing is rotated
  // What the product behind attention reads, contiguous: fetched ahead (paged_attention());
  // undefined: nothing
  at::Tensor ahead = {};
};
// Writes keys and values to the slots of their rows; on a GPU one kernel. Returns the queries,
// [t, 1, n, d]. Not differentiable.
at::Tensor append_rows(PagedBuffer& keys, PagedBuffer& values, const PagedRows& rows,
                       const AddedRows& added);

// The leading rows() of one token, each over all positions of its sequence up to its own.
//
//   q       [single, n, d]
//   keys    [blocks, block_size, g, d], values [blocks, block_size, g, v]
//   return  [single, n, v]
//
// Options: causal, scale, softcap, window_left, sinks. Not differentiable. `ahead`: of one row on a
// Hopper GPU fetched into the L2 cache, if it is small, since attention leaves the memory idle.
at::Tensor paged_attention(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                           const PagedRows& rows, const AttentionOptions& options,
                           const at::Tensor& ahead = {});

// The first position that any row of a part sees.
int64_t first_seen(const RaggedPart& part, const AttentionOptions& options);

// All rows of parts of several tokens, q [t - single, n, d] -> [t - single, n, v], on a GPU by
// libtorch's flash attention, long texts that begin here by cuDNN's; nothing: they do not compute
// exactly this.
std::optional<at::Tensor> attend_chunks(const at::Tensor& q, const PagedBuffer& keys,
                                        const PagedBuffer& values, const PagedRows& rows,
                                        const AttentionOptions& options);

// The rows of one token by `single`, [single, n, d] -> [single, n, v], and each part of several by
// `several`, [count, 1, n, d] -> [count, 1, n, v].
//
//   q       [t, 1, n, d]
//   return  [t, 1, n, v]
at::Tensor attend_parts(
    const PagedRows& rows, const at::Tensor& q,
    const std::function<at::Tensor(const at::Tensor& q)>& single,
    const std::function<at::Tensor(const RaggedPart& part, const at::Tensor& q)>& several);

}  // namespace megatron
