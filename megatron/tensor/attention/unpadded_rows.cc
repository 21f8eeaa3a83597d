#include "megatron/tensor/attention/unpadded_rows.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Steps between full rows and none: at most so many numbers of rows.
constexpr int64_t kSteps = 32;

// Multiples that suit the products of many rows.
int64_t usual_multiple(int64_t all) {
  if (all >= 64 * kSteps) return 64;
  return all >= 16 * kSteps ? 16 : 1;
}

int64_t round_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

int64_t row_step(int64_t all, int64_t multiple_of) {
  return round_up((all + kSteps - 1) / kSteps, std::lcm(usual_multiple(all), multiple_of));
}

at::Tensor numbers(std::initializer_list<int64_t> shape, at::ScalarType type = at::kLong) {
  return at::empty(shape, at::dtype(type));
}

}  // namespace

int64_t unpadded_row_count(int64_t texts, int64_t all, int64_t multiple_of) {
  return std::min(all, round_up(texts, row_step(all, multiple_of)));
}

std::vector<int64_t> text_lengths(const TextMask& texts, int64_t samples) {
  const auto& [mask, counts] = texts;
  MEGATRON_ASSERT(samples > 0 && !mask.empty() && std::ssize(mask) % samples == 0, "a mask of ",
                  mask.size(), " elements for ", samples, " samples");
  MEGATRON_ASSERT(counts.empty() || counts.size() == mask.size(), counts.size(), " weights for ",
                  mask.size(), " tokens");
  const int64_t s = std::ssize(mask) / samples;
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < samples; ++i) {
    int64_t length = s;
    const auto is_text = [&](int64_t place) {
      const auto at = static_cast<size_t>(place);
      return mask[at] != 0 || (!counts.empty() && counts[at] != 0);
    };
    while (length > 1 && !is_text(i * s + length - 1)) --length;
    lengths.push_back(length);
  }
  return lengths;
}

bool UnpaddedRows::has_holes() const {
  return std::find(holes.begin(), holes.end(), true) != holes.end();
}

std::vector<at::Tensor*> UnpaddedRows::tensors() {
  return {&sample, &position, &places, &rows_of, &first, &kinds, &offsets, &counts};
}

std::vector<const at::Tensor*> UnpaddedRows::tensors() const {
  return {&sample, &position, &places, &rows_of, &first, &kinds, &offsets, &counts};
}

at::Tensor UnpaddedRows::column(const at::Tensor& padded) const {
  MEGATRON_ASSERT(padded.size(0) == samples && padded.size(1) == length, "a column of ",
                  padded.size(0), " samples of ", padded.size(1), ", expected ", samples, " of ",
                  length);
  return take_rows(padded.flatten(0, 1), places).unsqueeze(0);
}

at::Tensor UnpaddedRows::with_padding(const at::Tensor& x) const {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = length;
  shape.insert(shape.begin(), samples);
  return take_rows(x, rows_of).view(shape).transpose(0, 1);
}

UnpaddedRows make_unpadded_rows(const TextMask& texts_of, std::span<const int64_t> samples,
                                int64_t multiple_of, int64_t rows) {
  UnpaddedRows out;
  const std::span<const uint8_t> mask = texts_of.mask;
  const int64_t b = out.samples = std::ssize(samples);
  out.lengths = text_lengths(texts_of, b);
  const int64_t s = out.length = std::ssize(mask) / b;
  const auto of_sample = [&](int64_t i) {
    return mask.subspan(static_cast<size_t>(i * s), static_cast<size_t>(s));
  };
  for (int64_t i = 0; i < b; ++i) {
    const std::span<const uint8_t> tokens = of_sample(i);
    const int64_t length = out.lengths[static_cast<size_t>(i)];
    out.holes.push_back(std::find(tokens.begin(), tokens.begin() + length, 0) !=
                        tokens.begin() + length);
  }
  const int64_t texts = std::accumulate(out.lengths.begin(), out.lengths.end(), int64_t{0});
  MEGATRON_ASSERT(rows == 0 || rows >= texts, rows, " rows for texts of ", texts);
  out.rows = rows > 0 ? rows : unpadded_row_count(texts, b * s, multiple_of);
  out.most_empty = rows > 0 ? rows - texts : row_step(b * s, multiple_of);

  out.sample = numbers({out.rows});
  out.position = numbers({out.rows});
  out.places = numbers({out.rows});
  out.rows_of = numbers({b * s});
  out.first = numbers({b});
  out.kinds = numbers({b, s});
  out.offsets = numbers({b + 1}, at::kInt);
  out.counts = numbers({b}, at::kInt);
  auto* sample = out.sample.mutable_data_ptr<int64_t>();
  auto* position = out.position.mutable_data_ptr<int64_t>();
  auto* place = out.places.mutable_data_ptr<int64_t>();
  auto* row_of = out.rows_of.mutable_data_ptr<int64_t>();
  auto* kind = out.kinds.mutable_data_ptr<int64_t>();
  int64_t row = 0;
  for (int64_t i = 0; i < b; ++i) {
    const std::span<const uint8_t> tokens = of_sample(i);
    const int64_t length = out.lengths[static_cast<size_t>(i)];
    out.first.mutable_data_ptr<int64_t>()[i] = row;
    out.offsets.mutable_data_ptr<int32_t>()[i] = static_cast<int32_t>(row);
    out.counts.mutable_data_ptr<int32_t>()[i] = static_cast<int32_t>(length);
    for (int64_t j = 0; j < s; ++j) {
      const bool inside = j < length;
      row_of[i * s + j] = inside ? row : out.rows;
      const TokenKind what = !inside                               ? TokenKind::kPadding
                             : tokens[static_cast<size_t>(j)] != 0 ? TokenKind::kText
                                                                   : TokenKind::kHole;
      kind[i * s + j] = static_cast<int64_t>(what);
      if (!inside) continue;
      sample[row] = samples[static_cast<size_t>(i)];
      position[row] = j;
      place[row] = i * s + j;
      ++row;
    }
  }
  out.offsets.mutable_data_ptr<int32_t>()[b] = static_cast<int32_t>(row);
  for (; row < out.rows; ++row) {
    sample[row] = samples.back();
    position[row] = 0;
    place[row] = b * s;
  }
  return out;
}

void use_few_plans(UnpaddedRows& rows) {
  constexpr int64_t kStep = 64;
  const auto power = [](int64_t n) { return std::bit_ceil(static_cast<uint64_t>(n)); };
  const int64_t longest = std::max<int64_t>(rows.length, 1),
                octave = static_cast<int64_t>(power(longest)) / 2;
  rows.most = round_up(longest, std::max(kStep, octave / 8));
  const int64_t ranges = rows.counts.size(0);
  const auto all = static_cast<int64_t>(power(std::max<int64_t>(1, ranges)));
  rows.counts = at::cat({rows.counts, at::zeros({all - ranges}, at::kInt)});
  rows.offsets = at::cat({rows.offsets, rows.offsets.narrow(0, ranges, 1).expand(all - ranges)});
}

UnpaddedRows make_document_rows(std::span<const DocumentPlace> documents, int64_t s, int64_t b) {
  constexpr int64_t kLeastLength = 256;
  UnpaddedRows out;
  int64_t longest = 1;
  for (const DocumentPlace& one : documents) {
    MEGATRON_ASSERT(one.sample >= 0 && one.sample < b && one.begin >= 0 && one.length > 0 &&
                        one.begin + one.length <= s,
                    "a document outside of its sample");
    longest = std::max(longest, one.length);
  }
  const auto power = [](int64_t n) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
  };
  out.samples = power(std::max<int64_t>(1, std::ssize(documents)));
  out.length = std::min(s, power(std::max(longest, kLeastLength)));
  out.rows = s * b;
  out.step = b;
  out.offsets = at::full({out.samples + 1}, out.rows, at::kInt);
  out.counts = at::zeros({out.samples}, at::kInt);
  auto* offset = out.offsets.mutable_data_ptr<int32_t>();
  auto* count = out.counts.mutable_data_ptr<int32_t>();
  for (const DocumentPlace& one : documents) {
    *offset++ = static_cast<int32_t>(one.begin * b + one.sample);
    *count++ = static_cast<int32_t>(one.length);
  }
  return out;
}

at::Tensor mask_of_kinds(const at::Tensor& kinds) {
  return kinds.unsqueeze(2).ne(kinds.unsqueeze(1)).unsqueeze(1);
}

at::Tensor kinds_of_mask(const at::Tensor& mask, const at::Tensor& counts) {
  const auto kind = [](TokenKind one) { return static_cast<int64_t>(one); };
  const at::Tensor text = mask != 0, position = at::arange(mask.size(1), mask.device());
  const at::Tensor inside = counts.defined() ? text.logical_or(counts != 0) : text;
  const at::Tensor last = (inside * position).amax(1, /*keepdim=*/true);
  const at::Tensor others =
      at::where(position > last, at::scalar_tensor(kind(TokenKind::kPadding), position.options()),
                at::scalar_tensor(kind(TokenKind::kHole), position.options()));
  return others.masked_fill_(text, kind(TokenKind::kText));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TakeRows : torch::autograd::Function<TakeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& index) {
    const int64_t rows = x.size(0);
    context->saved_data["rows"] = rows;
    context->save_for_backward({index});
    std::vector<int64_t> one_each(static_cast<size_t>(x.dim()), 1);
    one_each[0] = index.size(0);
    return x.index_select(0, index.clamp_max(rows - 1))
        .masked_fill_((index == rows).view(one_each), 0);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const int64_t rows = context->saved_data["rows"].toInt();
    const at::Tensor index = context->get_saved_variables()[0];
    // A row behind the last one takes what belongs to none.
    std::vector<int64_t> shape = grads[0].sizes().vec();
    shape[0] = rows + 1;
    const at::Tensor dx = at::zeros(shape, grads[0].options());
    dx.index_copy_(0, index, grads[0]);
    return {dx.narrow(0, 0, rows), at::Tensor()};
  }
};

}  // namespace

at::Tensor take_rows(const at::Tensor& x, const at::Tensor& index) {
  return TakeRows::apply(x, index);
}

}  // namespace megatron
