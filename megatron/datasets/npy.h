// One- and two-dimensional arrays in NumPy's .npy format, version 1, little endian, C order; used
// for index caches and for retrieval (retro/).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {

// The header that precedes the elements. `dtype` as NumPy spells it: "<i2", "<i4", "<u4",
// "<i8", "<u8", "<f2", "<f4".
std::string npy_header(const std::string& dtype, const std::vector<int64_t>& shape);

// A mapped array. The header is checked against the file's size: it must contain exactly the
// elements.
class NpyArray {
 public:
  explicit NpyArray(const std::filesystem::path& path);  // throws Error
  const std::string& dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const { return size_; }                      // number of elements
  std::span<const std::byte> bytes() const { return data_; }  // the elements
  // The elements, which must have the C++ type of `dtype()`.
  template <class T>
  std::span<const T> as(const std::string& dtype) const {
    MEGATRON_CHECK(dtype_ == dtype, path_, ": element type is \"", dtype_, "\", expected \"", dtype,
                   "\"");
    return {reinterpret_cast<const T*>(data_.data()), static_cast<size_t>(size_)};
  }

 private:
  void parse_header(std::string_view header);
  std::string path_;
  MappedFile file_;
  std::string dtype_;
  std::vector<int64_t> shape_;
  int64_t size_ = 0;
  std::span<const std::byte> data_;
};

}  // namespace megatron
