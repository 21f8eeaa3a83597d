// Which parts of its sequences a rank holds, and what their recurrences need of other parts: under
// context parallelism states travel between ranks, not tokens.
//
// The s tokens are cut into 2c segments, of which rank r holds r and 2c - 1 - r
// (context_parallel/context_parallel.h); without context parallelism there is one segment.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace megatron {

class ProcessGroup;
struct ForwardContext;

class Segments {
 public:
  struct Segment {
    int64_t index = 0;  // in the order of the text
    int64_t first = 0;  // its first row among those of this rank
    int64_t rows = 0;
    // Numbers of documents (document_runs) [rows, b], and of the rows before [..., b]; undefined:
    // one document
    at::Tensor runs;
    at::Tensor runs_before;  // [width - 1, b]
    at::Tensor run;          // [b] of the last row before
    at::Tensor rows_of(const at::Tensor& x) const { return x.narrow(0, first, rows); }
  };

  // `local` rows on each rank of cp; `runs`: document_runs() [s, b] of the whole sequence or
  // undefined; convolutions read `width` rows.
  Segments(int64_t local, const at::Tensor& runs, int64_t width, const ProcessGroup& cp);
  // Of a pass; its group of context ranks, if it has one, in the place of cp.
  static std::shared_ptr<const Segments> of_pass(const ForwardContext& pass, int64_t local,
                                                 int64_t width, const ProcessGroup& cp);

  const std::vector<Segment>& own() const { return own_; }
  bool exchanges() const;

  // The width - 1 rows before each own segment, [width - 1, b, C], those before the first of the
  // sequence zero. u [local, b, C]. Undefined tensors without context parallelism.
  //
  // Communication: an all-gather of min(width - 1, rows) rows of each segment over cp.
  std::vector<at::Tensor> rows_before(const at::Tensor& u) const;
  // The backward: adds the gradients of the rows before each own segment, [width - 1, b, C] each,
  // to du where those rows lie.
  //
  // Communication: an all-gather of them over cp.
  void return_row_grads(const std::vector<at::Tensor>& grads, const at::Tensor& du) const;

  // Those of the own segments among all segments in the order of the text.
  std::vector<at::Tensor> own_of(const std::vector<at::Tensor>& all) const;
  // A tensor of equal shape of each own segment -> those of all segments in the order of the text.
  //
  // Communication: an all-gather over cp.
  std::vector<at::Tensor> of_all(const std::vector<at::Tensor>& own) const;

 private:
  int64_t count() const;  // of segments of the whole sequence

  const ProcessGroup& cp_;
  const int64_t width_;
  int64_t rows_;  // of a segment
  std::vector<Segment> own_;
};

// The state before each segment, [b, ...], of affine maps next = decay * state + added in the order
// of the text, from a state of zero before the first: n tensors. Decay is broadcast.
std::vector<at::Tensor> states_before(const std::vector<at::Tensor>& decay,
                                      const std::vector<at::Tensor>& added);
// The gradient of the state after each segment: that of the last is zero, and that before a segment
// is decay * (that after it) + own.
std::vector<at::Tensor> state_grads_after(const std::vector<at::Tensor>& decay,
                                          const std::vector<at::Tensor>& own);

}  // namespace megatron
