#include "megatron/training/proving/proof_data.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// A prime, so that micro-batches and data ranks do not divide it
constexpr int64_t kWholeSet = 37;

// Samples that are masked alike. Not those of a micro-batch: layouts with other ones are compared.
constexpr int64_t kPair = 2;

// Which loss weights of a sample stay
enum class Kept { kAll, kNone, kLast, kInner };

// By the place among 7 pairs. Every second one is as it was, so that two of them make a step with
// tokens.
Kept kept_in(int64_t index) {
  switch (index / kPair % 7) {
    case 1:
      return Kept::kNone;
    case 3:
      return Kept::kLast;
    case 5:
      return index % kPair == 0 ? Kept::kInner : Kept::kNone;
    default:
      return Kept::kAll;
  }
}

// All bits 0 is the number 0 in every element type. A weight of the whole sample is masked with all
// of it only.
void mask_column(Kept kept, std::span<std::byte> bytes, int64_t count) {
  const size_t each = bytes.size() / static_cast<size_t>(count);
  const auto counts = [&](int64_t place) {
    const auto element = bytes.subspan(static_cast<size_t>(place) * each, each);
    return std::ranges::any_of(element, [](std::byte byte) { return byte != std::byte{0}; });
  };
  const int64_t few = (count + 15) / 16;  // less than a chunk of 4 context ranks
  int64_t first = 0, last = 0;            // [first, last) keep their weight
  if (kept == Kept::kLast) {
    for (last = count; last > few && !counts(last - 1);) --last;
    first = last - few;
  } else if (kept == Kept::kInner) {
    for (first = count / 4; first + few < count && !counts(first);) ++first;
    last = first + few;
  }
  std::ranges::fill(bytes.first(static_cast<size_t>(first) * each), std::byte{0});
  std::ranges::fill(bytes.subspan(static_cast<size_t>(last) * each), std::byte{0});
}

void mask(Kept kept, const SampleSpans& sample) {
  if (kept == Kept::kAll) return;
  const Columns& columns = sample.columns();
  for (size_t i = 0; i < columns.size(); ++i) {
    const int64_t count = columns[i].shape[0];
    if (columns[i].is_loss_weight && (count > 1 || kept == Kept::kNone))
      mask_column(kept, {static_cast<std::byte*>(sample.data(i)), columns.row_bytes(i)}, count);
  }
}

// Ends of documents in 24ths of a sequence: borders between the chunks of different context ranks,
// of 2, 3 and 4 of them. Without ends: the documents stay.
constexpr int kParts = 24;
constexpr std::array<std::array<int64_t, 2>, 7> kEnds = {
    {{6, 18}, {4, 16}, {3, 15}, {}, {8, 20}, {9, 21}, {}}};

void move_documents(int64_t index, const SampleSpans& sample, std::vector<int32_t>& starts) {
  const std::array<int64_t, 2>& ends = kEnds[static_cast<size_t>(index) % kEnds.size()];
  if (starts.size() < 2 || ends[1] == 0) return;
  const Columns& columns = sample.columns();
  const int64_t length = columns.sequence_length();
  const auto column = std::ranges::find(columns, "position_ids", &Column::name);
  std::span<int64_t> positions;
  if (column != columns.end() && !column->is_counted) positions = sample.get<int64_t>(column->name);
  const bool restart = !positions.empty() && positions[static_cast<size_t>(starts[1])] == 0;
  starts.assign(1, 0);
  for (size_t k = 0; k < ends.size(); ++k) {
    // Before, at or behind the border
    const auto shift = (index + static_cast<int64_t>(k)) % 3 - 1;
    const auto start = static_cast<int32_t>(length * ends[k] / kParts + shift);
    if (start > starts.back() && start < length) starts.push_back(start);
  }
  if (!restart) return;
  const std::vector<int32_t> bounds = cu_seqlens(starts, length);
  for (size_t k = 0; k + 1 < bounds.size(); ++k)
    for (int32_t i = bounds[k]; i < bounds[k + 1]; ++i)
      positions[static_cast<size_t>(i)] = i - bounds[k];
}

class ProofDataset final : public Dataset {
 public:
  ProofDataset(std::shared_ptr<const Dataset> of, int64_t size)
      : Dataset(of->columns()), of_(std::move(of)), size_(std::min(size, of_->size())) {}
  int64_t size() const override { return size_; }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override {
    of_->read(index, out, document_starts);
    mask(kept_in(index), out);
    move_documents(index, out, document_starts);
  }
  std::pair<int64_t, int64_t> locate(int64_t index) const override { return of_->locate(index); }
  std::vector<SampleImage> images(int64_t index) const override { return of_->images(index); }
  void read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const override {
    of_->read_image(index, image, patches);
  }
  std::vector<SampleSound> sounds(int64_t index) const override { return of_->sounds(index); }
  void read_sound(int64_t index, int64_t sound, std::span<float> frames) const override {
    of_->read_sound(index, sound, frames);
  }
  const PixelTable* pixel_values() const override { return of_->pixel_values(); }
  std::string description() const override {
    return cat("{\"class\": \"ProofDataset\", \"of\": ", of_->description(), "}");
  }

 private:
  const std::shared_ptr<const Dataset> of_;
  const int64_t size_;
};

}  // namespace

TrainValidTestDatasets proof_datasets(TrainValidTestDatasets sets, const Arguments& arguments) {
  const auto wrap = [&](std::shared_ptr<const Dataset>& set, bool whole) {
    if (set) set = std::make_shared<const ProofDataset>(set, whole ? kWholeSet : set->size());
  };
  if (arguments.data.multiple_validation_sets && sets.valid.size() == 1 && sets.test)
    sets.valid.push_back(sets.test);
  for (std::shared_ptr<const Dataset>& set : sets.valid) wrap(set, arguments.data.full_validation);
  wrap(sets.train, /*whole=*/false);
  wrap(sets.test, /*whole=*/false);
  return sets;
}

}  // namespace megatron
