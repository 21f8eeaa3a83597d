// Builds a tokenizer's fingerprint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

class Fingerprint {
 public:
  void number(int64_t value) { append(&value, sizeof(value)); }
  void real(double value) { append(&value, sizeof(value)); }
  void string(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    text_ += value;
  }
  // 32 hexadecimal digits for the data added so far.
  std::string digits() const;

 private:
  void append(const void* data, size_t size) { text_.append(static_cast<const char*>(data), size); }
  std::string text_;
};

}  // namespace megatron
