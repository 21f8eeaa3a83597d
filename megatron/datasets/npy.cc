#include "megatron/datasets/npy.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>

namespace megatron {
namespace {

constexpr char kNpyMagic[] = "\x93NUMPY\x01\x00";
constexpr size_t kNpyMagicBytes = 8, kPreambleBytes = 10;

int64_t element_bytes(const std::string& dtype) {
  if (dtype == "<i2" || dtype == "<f2") return 2;
  if (dtype == "<i4" || dtype == "<u4" || dtype == "<f4") return 4;
  if (dtype == "<i8" || dtype == "<u8") return 8;
  return 0;
}

// The text after `'key':` in a header such as {'descr': '<i4', 'fortran_order': False, 'shape': (3,
// 2), }.
std::string_view value_of(std::string_view header, std::string_view key) {
  const size_t at = header.find("'" + std::string(key) + "':");
  if (at == std::string_view::npos) return {};
  header.remove_prefix(at + key.size() + 3);
  header.remove_prefix(std::min(header.find_first_not_of(' '), header.size()));
  return header;
}

}  // namespace

std::string npy_header(const std::string& dtype, const std::vector<int64_t>& shape) {
  std::string text = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += shape.size() == 1 ? ",), }" : "), }";
  text.append(63 - (kPreambleBytes + text.size()) % 64, ' ');  // elements start at a multiple of 64
  text += '\n';
  std::string out(kNpyMagic, kNpyMagicBytes);
  out += static_cast<char>(text.size() & 0xff);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

NpyArray::NpyArray(const std::filesystem::path& path) : path_(path.string()), file_(path) {
  const auto bytes = file_.bytes();
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  MEGATRON_CHECK(
      bytes.size() >= kPreambleBytes && std::memcmp(text, kNpyMagic, kNpyMagicBytes) == 0, path_,
      ": the first 8 bytes are not those of a .npy file of version 1");
  const size_t header_bytes = static_cast<uint8_t>(text[8]) | size_t{static_cast<uint8_t>(text[9])}
                                                                  << 8;
  MEGATRON_CHECK(kPreambleBytes + header_bytes <= bytes.size(), path_,
                 ": the header at byte 10 has ", header_bytes, " bytes, the file has ",
                 bytes.size());
  parse_header({text + kPreambleBytes, header_bytes});
  data_ = bytes.subspan(kPreambleBytes + header_bytes);
  const int64_t width = element_bytes(dtype_);
  MEGATRON_CHECK(data_.size() % width == 0 && static_cast<int64_t>(data_.size() / width) == size_,
                 path_, ": ", data_.size(), " bytes follow the header, its shape needs ", size_,
                 " elements of ", width, " bytes");
  MEGATRON_CHECK(reinterpret_cast<uintptr_t>(data_.data()) % 8 == 0, path_,
                 ": the elements start at byte ", kPreambleBytes + header_bytes,
                 ", which is no multiple of 8");
}

void NpyArray::parse_header(std::string_view header) {
  const std::string_view descr = value_of(header, "descr"),
                         order = value_of(header, "fortran_order");
  if (descr.size() >= 5 && descr[0] == '\'' && descr[4] == '\'') dtype_ = descr.substr(1, 3);
  MEGATRON_CHECK(element_bytes(dtype_) > 0, path_,
                 ": the header names no element type of <i2, <i4, <u4, <i8, <u8, <f2, <f4");
  MEGATRON_CHECK(order.starts_with("False"), path_,
                 ": the header does not say 'fortran_order': False");
  std::string_view shape = value_of(header, "shape");
  MEGATRON_CHECK(shape.starts_with("("), path_, ": the header has no shape");
  shape.remove_prefix(1);
  size_ = 1;
  while (!shape.empty() && shape[0] != ')') {
    if (shape[0] == ' ' || shape[0] == ',') {
      shape.remove_prefix(1);
      continue;
    }
    int64_t n = -1;
    const auto [end, error] = std::from_chars(shape.data(), shape.data() + shape.size(), n);
    MEGATRON_CHECK(error == std::errc() && n >= 0, path_,
                   ": the header's shape holds something else than sizes");
    MEGATRON_CHECK(shape_.size() < 2, path_, ": the header's shape has more than 2 dimensions");
    MEGATRON_CHECK(n == 0 || size_ <= std::numeric_limits<int64_t>::max() / 8 / n, path_,
                   ": the header's shape is too large");
    shape.remove_prefix(end - shape.data());
    shape_.push_back(n);
    size_ *= n;
  }
  MEGATRON_CHECK(!shape.empty() && !shape_.empty(), path_,
                 ": the header's shape is not closed or empty");
}

}  // namespace megatron
