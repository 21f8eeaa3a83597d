// What samples are made of: named arrays of fixed shapes. A dataset declares its columns; loader,
// blends, device copies and context parallelism know nothing else of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace megatron {

enum class ElementType { kInt64, kInt32, kUInt8, kFloat32 };

template <class T>
constexpr ElementType element_type_of() {
  if constexpr (std::is_same_v<T, int64_t>) return ElementType::kInt64;
  if constexpr (std::is_same_v<T, int32_t>) return ElementType::kInt32;
  if constexpr (std::is_same_v<T, uint8_t>) return ElementType::kUInt8;
  if constexpr (std::is_same_v<T, float>) return ElementType::kFloat32;
}

struct Column {
  std::string name;
  ElementType type = ElementType::kInt64;
  std::vector<int64_t> shape;  // of one sample; the first dimension of a sequence is its length
  // Each context-parallel rank gets its part of the first dimension; false: all of it
  bool split = true;
  // The loss weight of tokens, or of whole samples: 0 in samples that only fill up a last batch
  bool is_loss_weight = false;
  // Of a loss weight: elements of a sample that are not 0, at most; 0: not known
  int64_t most_counted = 0;
  // uint8 [s]: 0 behind the end of a sample's text, where nothing needs to be computed
  bool marks_text = false;
  // float32 [s]: texts that the named column marks go on up to the last element that is not 0
  std::string extends = {};
  // 0, 1, 2, ... in every sample: not copied to the device
  bool is_counted = false;
  // Elements beyond the end of a sequence that is lengthened to divide over ranks
  double padding = 0;

  bool operator==(const Column&) const = default;
};

// The columns of a dataset, in order; the first one has the length of the sequence that positions
// and documents refer to. An immutable value that is cheap to copy.
class Columns {
 public:
  // Throws Error for a name that is given twice and for a column without dimensions.
  explicit Columns(std::vector<Column> columns);

  size_t size() const { return columns_->size(); }
  const Column& operator[](size_t i) const { return (*columns_)[i]; }
  auto begin() const { return columns_->begin(); }
  auto end() const { return columns_->end(); }
  int64_t sequence_length() const { return columns_->front().shape.front(); }
  // Throws Error that names the columns if there is none of this name.
  size_t index(std::string_view name) const;
  bool operator==(const Columns& other) const { return *columns_ == *other.columns_; }
  std::string text() const;  // "tokens int64 [1024], loss_mask float32 [1024]"

  // Samples lie in one block of memory, column after column, each [rows, shape] row-major and
  // aligned to 64 bytes.
  size_t row_bytes(size_t column) const;  // of one sample
  size_t offset(size_t column, int64_t rows) const;
  size_t block_bytes(int64_t rows) const { return offset(size(), rows); }

 private:
  std::shared_ptr<const std::vector<Column>> columns_;
};

// A block of samples as columns; does not own the memory.
class ColumnBlock {
 public:
  ColumnBlock(const Columns& columns, void* block, int64_t rows)
      : columns_(&columns), block_(static_cast<std::byte*>(block)), rows_(rows) {}
  void* data(size_t column) const { return block_ + columns_->offset(column, rows_); }
  void* data(size_t column, int64_t row) const {
    return static_cast<std::byte*>(data(column)) +
           static_cast<size_t>(row) * columns_->row_bytes(column);
  }
  // Elements of all rows, or of one. Throws as Columns::index(), and Error for elements of another
  // type.
  template <class T>
  std::span<T> all(std::string_view name) const {
    const size_t column = typed(name, element_type_of<T>());
    return {static_cast<T*>(data(column)),
            static_cast<size_t>(rows_) * columns_->row_bytes(column) / sizeof(T)};
  }
  template <class T>
  std::span<T> row(std::string_view name, int64_t row) const {
    const size_t column = typed(name, element_type_of<T>());
    return {static_cast<T*>(data(column, row)), columns_->row_bytes(column) / sizeof(T)};
  }
  const Columns& columns() const { return *columns_; }

 private:
  size_t typed(std::string_view name, ElementType type) const;

  const Columns* columns_;
  std::byte* block_;
  int64_t rows_;
};

// Where one sample is written: an array for each column.
class SampleSpans {
 public:
  SampleSpans(ColumnBlock block, int64_t row) : block_(block), row_(row) {}
  // Throws as ColumnBlock::row().
  template <class T>
  std::span<T> get(std::string_view name) const {
    return block_.row<T>(name, row_);
  }
  const Columns& columns() const { return block_.columns(); }
  void* data(size_t column) const { return block_.data(column, row_); }

 private:
  ColumnBlock block_;
  int64_t row_;
};

// -- language models that predict the next token

// tokens, labels, position_ids (int64) and loss_mask (float32), each [sequence_length].
// `own_positions`: position ids do not simply count from 0.
Columns gpt_columns(int64_t sequence_length, bool own_positions = false);

// A sample with these columns.
struct GPTSpans {
  explicit GPTSpans(const SampleSpans& sample);
  // From row `at` on nothing counts; positions go on from `position`.
  void pad(size_t at, int64_t position) const;
  std::span<int64_t> tokens;
  // the next token; positions that are not trained on have loss_mask 0
  std::span<int64_t> labels;
  std::span<int64_t> position_ids;
  std::span<float> loss_mask;
};

}  // namespace megatron
