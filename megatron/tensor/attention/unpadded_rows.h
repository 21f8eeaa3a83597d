// The rows of a micro-batch of samples without padding: the texts one after another, each from its
// first token to its last, and behind them empty rows up to one of few numbers of rows, so that
// shapes stay few.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/tensor/random.h"

namespace megatron {

// Kinds of tokens of a sample. A hole is a token inside of the text that the text does not attend
// to; holes attend to one another.
enum class TokenKind : int64_t { kText = 0, kHole = 1, kPadding = 2 };

// The number of rows for `texts` rows of text in a micro-batch of `all` rows with padding: a
// multiple of about 1/32 of those, of `multiple_of`, and if there are many, of 64 (16); at most
// all. `all` is a multiple of multiple_of.
int64_t unpadded_row_count(int64_t texts, int64_t all, int64_t multiple_of);

// Which tokens of samples [b, s] belong to texts: 0 where a token is a hole or padding. A text ends
// with its last token that is neither, or that counts in the loss, and has one token at least.
struct TextMask {
  std::span<const uint8_t> mask;
  std::span<const float> counts = {};  // weights in the loss; empty: not needed
};

// Tokens of each of the texts.
std::vector<int64_t> text_lengths(const TextMask& texts, int64_t samples);

struct UnpaddedRows {
  int64_t samples = 0;           // b
  int64_t length = 0;            // s, with padding
  int64_t rows = 0;              // R
  int64_t most_empty = 0;        // empty rows, at most
  int64_t step = 1;              // from one of a text's rows to its next
  bool uniform = false;          // texts have `length` rows each, always, and there are no others
  std::vector<int64_t> lengths;  // [b], at least 1; on the host
  std::vector<bool> holes;       // [b]: whether the sample has any; on the host
  bool has_holes() const;

  at::Tensor sample;    // [R] int64, of each row; of empty ones that of the last sample
  at::Tensor position;  // [R] int64, of each row in its sample; 0 of empty ones
  at::Tensor places;    // [R] int64: i s + j for position j of sample i; b s of empty ones
  at::Tensor rows_of;   // [b s] int64: the row of each such place; R of padding
  at::Tensor first;     // [b] int64: rows of the first tokens
  at::Tensor kinds;     // [b, s] int64, TokenKind
  // Of kernels over ranges of rows, of which there are c >= b, those behind the samples empty
  at::Tensor offsets;  // [c + 1] int32: rows before each range, and of all texts
  at::Tensor counts;   // [c] int32: the lengths
  int64_t most = 0;    // no range is longer; 0: `length`
  // All of them, in a fixed order.
  std::vector<at::Tensor*> tensors();
  std::vector<const at::Tensor*> tensors() const;

  TokenPositions place() const { return {sample, position}; }
  // A column [b, s, ...] of the samples as one of rows, [1, R, ...]; 0 in empty ones.
  at::Tensor column(const at::Tensor& padded) const;
  // Rows [R, ...] as samples with padding [s, b, ...], whose padding is 0. Differentiable.
  at::Tensor with_padding(const at::Tensor& x) const;
};

// `samples` [b]: their ordinals. `rows`: how many, at least those of the texts; 0:
// unpadded_row_count(). The tensors are on the CPU.
UnpaddedRows make_unpadded_rows(const TextMask& texts, std::span<const int64_t> samples,
                                int64_t multiple_of, int64_t rows = 0);

// Libraries make a plan of attention for each number and length of ranges, which takes them a part
// of a second. Where both differ from micro-batch to micro-batch, ranges become a power of two, by
// empty ones, and `most` one of eight numbers in an octave.
void use_few_plans(UnpaddedRows& rows);

// Where a document lies: in which sample of a micro-batch, and where in it.
struct DocumentPlace {
  int64_t sample = 0, begin = 0, length = 0;
};

// Documents of samples [s, b] as texts of rows in that order, for attention within them: of these
// fields samples, length, rows, step, offsets and counts are set. So that shapes stay few, samples
// and length are powers of two, the length from 256 on, at most s; texts behind the last document
// have no rows. The tensors are on the CPU.
UnpaddedRows make_document_rows(std::span<const DocumentPlace> documents, int64_t s, int64_t b);

// Which queries [b, 1, s, s] may NOT attend to which keys: text to text, holes to holes.
at::Tensor mask_of_kinds(const at::Tensor& kinds);
// The kinds [b, s] of tokens, on the device of the mask; `counts` may be undefined.
at::Tensor kinds_of_mask(const at::Tensor& mask, const at::Tensor& counts = {});

// Rows `index` [k] of x [n, ...], zeros where the index is n. No other row is taken twice, so that
// the backward writes each gradient once. Differentiable.
at::Tensor take_rows(const at::Tensor& x, const at::Tensor& index);

}  // namespace megatron
