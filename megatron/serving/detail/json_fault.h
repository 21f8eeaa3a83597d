// Where a text stops being the JSON that requests may have: for messages, since the parser itself
// does not tell.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace megatron {

struct JsonFault {
  size_t offset = 0;  // in bytes
  std::string path;   // of the value that is read there: "messages[2].content"; empty: the whole
  std::string what;   // "a number beyond the range of doubles"
};

// The first fault; null: none. Numbers are faults if they are integers beyond 64 bits or doubles
// that are not finite.
std::optional<JsonFault> find_json_fault(std::string_view text, size_t max_depth);

}  // namespace megatron
