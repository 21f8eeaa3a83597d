#include "megatron/models/batch.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

namespace {

template <class Columns>
auto column_of(Columns& columns, std::string_view name) {
  return std::find_if(columns.begin(), columns.end(),
                      [&](const auto& column) { return column.first == name; });
}

}  // namespace

const at::Tensor& Batch::operator[](std::string_view column) const {
  const auto found = column_of(columns_, column);
  if (found != columns_.end()) return found->second;
  throw_error(cat("the model reads column ", column, ", the data has ",
                  listed(columns_, &NamedTensor::first)));
}

at::Tensor Batch::find(std::string_view column) const {
  const auto found = column_of(columns_, column);
  return found != columns_.end() ? found->second : at::Tensor();
}

std::shared_ptr<const UnpaddedRows> Batch::rows_of(std::string_view column) const {
  const auto found = column_of(unpadded, column);
  return found != unpadded.end() ? found->second : nullptr;
}

void Batch::set(std::string_view column, at::Tensor tensor) {
  const auto found = column_of(columns_, column);
  if (found != columns_.end())
    found->second = std::move(tensor);
  else
    columns_.emplace_back(column, std::move(tensor));
}

}  // namespace megatron
