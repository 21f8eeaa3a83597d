// Numbers and texts as little-endian bytes, one after another: messages between ranks.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "megatron/base/check.h"

namespace megatron {

static_assert(std::endian::native == std::endian::little, "ranks are little-endian");

template <class T>
concept PlainNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class ByteWriter {
 public:
  static constexpr bool kReads = false;
  std::string bytes;

  template <PlainNumber T>
  void operator()(const T& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void size(size_t count) { (*this)(static_cast<uint64_t>(count)); }
  void operator()(const std::string& text) {
    size(text.size());
    bytes += text;
  }
};

// Reads what a ByteWriter wrote. Throws Error where the bytes are others.
class ByteReader {
 public:
  static constexpr bool kReads = true;
  // `what`: for messages: "a step plan".
  ByteReader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <PlainNumber T>
  void operator()(T& value) {
    need(sizeof value);
    if constexpr (std::same_as<T, bool>) {
      MEGATRON_CHECK(bytes_[0] == 0 || bytes_[0] == 1, what_,
                     " has a flag that is neither 0 nor 1");
      value = bytes_[0] == 1;
    } else {
      bytes_.copy(reinterpret_cast<char*>(&value), sizeof value);
    }
    bytes_.remove_prefix(sizeof value);
  }
  // Of a list whose elements take at least a byte each.
  void size(size_t& count) {
    uint64_t value = 0;
    (*this)(value);
    MEGATRON_CHECK(value <= bytes_.size(), what_, " says that a list has ", value,
                   " elements, of which ", bytes_.size(), " bytes are left");
    count = static_cast<size_t>(value);
  }
  void operator()(std::string& text) {
    size_t count = 0;
    size(count);
    text = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
  }
  void finish() const {
    MEGATRON_CHECK(bytes_.empty(), what_, " has ", bytes_.size(), " bytes behind its end");
  }

 private:
  void need(size_t count) const { MEGATRON_CHECK(bytes_.size() >= count, what_, " is cut short"); }
  std::string_view bytes_;
  const char* what_;
};

}  // namespace megatron
