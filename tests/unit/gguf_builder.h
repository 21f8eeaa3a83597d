// Writes GGUF files for tests, well-formed or not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace megatron {

class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;
  std::optional<uint64_t> num_keys, num_tensors;  // instead of the right ones
  std::string magic = "GGUF";

  template <class T>
  static std::string number(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
  static std::string text(std::string_view value) {
    return number<uint64_t>(value.size()).append(value);
  }

  // A key with its type and the bytes of its value.
  GgufBuilder& raw(std::string_view name, uint32_t type, const std::string& value) {
    keys_.push_back(text(name) + number(type) + value);
    return *this;
  }
  GgufBuilder& key(std::string_view name, std::string_view value) {
    return raw(name, 8, text(value));
  }
  GgufBuilder& key(std::string_view name, const char* value) {
    return key(name, std::string_view(value));
  }
  template <class T>
    requires std::is_arithmetic_v<T>
  GgufBuilder& key(std::string_view name, T value) {
    return raw(name, type_of<T>(), number(value));
  }
  template <class T>
    requires std::is_arithmetic_v<T>
  GgufBuilder& key(std::string_view name, const std::vector<T>& values) {
    std::string bytes = number(type_of<T>()) + number<uint64_t>(values.size());
    for (const T value : values) bytes += number(value);
    return raw(name, 9, bytes);
  }
  GgufBuilder& key(std::string_view name, const std::vector<std::string>& values) {
    std::string bytes = number<uint32_t>(8) + number<uint64_t>(values.size());
    for (const std::string& value : values) bytes += text(value);
    return raw(name, 9, bytes);
  }

  // `extents`: as in files, the contiguous one first. `offset`: instead of the next free one.
  GgufBuilder& tensor(std::string_view name, const std::vector<uint64_t>& extents, uint32_t type,
                      const std::string& data, std::optional<uint64_t> offset = {}) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    std::string info = text(name) + number<uint32_t>(static_cast<uint32_t>(extents.size()));
    for (const uint64_t extent : extents) info += number(extent);
    tensors_.push_back(info + number(type) + number<uint64_t>(offset.value_or(data_.size())));
    data_ += data;
    return *this;
  }
  // Of fp32 elements that count up from 0 in steps of 1/64.
  GgufBuilder& tensor(std::string_view name, const std::vector<uint64_t>& extents) {
    uint64_t count = 1;
    for (const uint64_t extent : extents) count *= extent;
    std::string data;
    for (uint64_t i = 0; i < count; ++i) data += number(static_cast<float>(i) / 64.0f);
    return tensor(name, extents, 0, data);
  }

  // The header, keys and tensors without the data.
  std::string header() const {
    std::string out = magic + number(version) + number(num_tensors.value_or(tensors_.size())) +
                      number(num_keys.value_or(keys_.size()));
    for (const std::string& key : keys_) out += key;
    for (const std::string& tensor : tensors_) out += tensor;
    return out;
  }
  std::string build() const {
    std::string out = header();
    if (tensors_.empty()) return out;
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data_;
  }

 private:
  template <class T>
  static constexpr uint32_t type_of() {
    if constexpr (std::is_same_v<T, bool>) return 7;
    if constexpr (std::is_same_v<T, float>) return 6;
    if constexpr (std::is_same_v<T, double>) return 12;
    constexpr bool is_signed = std::is_signed_v<T>;
    switch (sizeof(T)) {
      case 1:
        return is_signed ? 1 : 0;
      case 2:
        return is_signed ? 3 : 2;
      case 4:
        return is_signed ? 5 : 4;
      default:
        return is_signed ? 11 : 10;
    }
  }

  std::vector<std::string> keys_, tensors_;
  std::string data_;
};

}  // namespace megatron
