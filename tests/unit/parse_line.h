// The arguments of a command line that stands in one string.
#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

inline std::vector<std::string> words(std::string_view text) {
  std::istringstream in{std::string(text)};
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

// `line` begins with the command. Throws UsageError with every violation.
inline Arguments parse_line(const std::string& line, int64_t world_size = 1) {
  const std::vector<std::string> tokens = words(line);
  std::vector<const char*> argv;
  for (const std::string& token : tokens) argv.push_back(token.c_str());
  return parse_arguments(static_cast<int>(argv.size()), argv.data(), world_size);
}

}  // namespace megatron
