// A trie of byte strings as a double array: finds the keys that a text starts with, with one array
// access per byte.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace megatron {

class DoubleArray {
 public:
  DoubleArray() = default;
  // Of equal keys the last one counts. Empty keys are ignored. Values are 0 or more.
  explicit DoubleArray(std::vector<std::pair<std::string_view, int32_t>> entries);

  bool empty() const { return units_.empty(); }

  // Calls match(length, value) for each key that `text` starts with, shortest first.
  template <class OnMatch>
  void for_each_prefix(std::string_view text, OnMatch&& match) const {
    if (units_.empty()) return;
    int32_t node = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const uint32_t next =
          static_cast<uint32_t>(units_[node].base) + static_cast<unsigned char>(text[i]);
      if (next >= units_.size() || units_[next].parent != node) return;
      node = static_cast<int32_t>(next);
      if (units_[node].value >= 0) match(i + 1, units_[node].value);
    }
  }

  // The value of the longest key that `text` starts with, -1 if there is none.
  int32_t find_longest(std::string_view text, size_t& length) const {
    int32_t found = -1;
    length = 0;
    for_each_prefix(text, [&](size_t size, int32_t value) {
      length = size;
      found = value;
    });
    return found;
  }

 private:
  struct Unit {
    int32_t base = 0;     // children are at base + byte
    int32_t parent = -1;  // -1: free
    int32_t value = -1;
  };
  std::vector<Unit> units_;
};

}  // namespace megatron
