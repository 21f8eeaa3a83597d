#include "megatron/datasets/columns.h"

#include <numeric>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

constexpr size_t kColumnAlignment = 64;

struct ElementFacts {
  const char* name;
  size_t bytes;
};

const ElementFacts& element_facts(ElementType type) {
  static constexpr ElementFacts kFacts[] = {
      {"int64", 8}, {"int32", 4}, {"uint8", 1}, {"float32", 4}};
  return kFacts[static_cast<size_t>(type)];
}

}  // namespace

Columns::Columns(std::vector<Column> columns)
    : columns_(std::make_shared<const std::vector<Column>>(std::move(columns))) {
  MEGATRON_CHECK(size() > 0, "samples without columns");
  for (size_t i = 0; i < size(); ++i) {
    const Column& column = (*this)[i];
    MEGATRON_CHECK(!column.shape.empty(), "column ", column.name, " has no dimensions");
    for (size_t before = 0; before < i; ++before)
      MEGATRON_CHECK((*this)[before].name != column.name, "two columns are named ", column.name);
  }
}

size_t Columns::index(std::string_view name) const {
  for (size_t i = 0; i < size(); ++i)
    if ((*this)[i].name == name) return i;
  throw_error(cat("there is no column ", name, "; the data has ", text()));
}

std::string Columns::text() const {
  return listed(*this, [](const Column& column) {
    return cat(column.name, " ", element_facts(column.type).name, " [", listed(column.shape), "]");
  });
}

size_t Columns::row_bytes(size_t column) const {
  const std::vector<int64_t>& shape = (*this)[column].shape;
  return std::accumulate(
      shape.begin(), shape.end(), element_facts((*this)[column].type).bytes,
      [](size_t bytes, int64_t size) { return bytes * static_cast<size_t>(size); });
}

size_t Columns::offset(size_t column, int64_t rows) const {
  size_t offset = 0;
  for (size_t i = 0; i < column; ++i)
    offset += (static_cast<size_t>(rows) * row_bytes(i) + kColumnAlignment - 1) / kColumnAlignment *
              kColumnAlignment;
  return offset;
}

size_t ColumnBlock::typed(std::string_view name, ElementType type) const {
  const size_t column = columns_->index(name);
  MEGATRON_CHECK((*columns_)[column].type == type, "column ", name, " is ",
                 element_facts((*columns_)[column].type).name, ", read as ",
                 element_facts(type).name);
  return column;
}

Columns gpt_columns(int64_t sequence_length, bool own_positions) {
  const std::vector<int64_t> shape = {sequence_length};
  return Columns({{.name = "tokens", .shape = shape},
                  {.name = "labels", .shape = shape},
                  {.name = "position_ids", .shape = shape, .is_counted = !own_positions},
                  {.name = "loss_mask",
                   .type = ElementType::kFloat32,
                   .shape = shape,
                   .is_loss_weight = true}});
}

GPTSpans::GPTSpans(const SampleSpans& sample)
    : tokens(sample.get<int64_t>("tokens")),
      labels(sample.get<int64_t>("labels")),
      position_ids(sample.get<int64_t>("position_ids")),
      loss_mask(sample.get<float>("loss_mask")) {}

void GPTSpans::pad(size_t at, int64_t position) const {
  for (; at < tokens.size(); ++at, ++position) {
    tokens[at] = labels[at] = 0;
    position_ids[at] = position;
    loss_mask[at] = 0.0F;
  }
}

}  // namespace megatron
