// The words of chat templates.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// A problem at a place of the source.
struct JinjaSyntaxError {
  size_t offset;
  std::string message;
};
[[noreturn]] void jinja_syntax_error(size_t offset, std::string message);

enum class JinjaTokenKind {
  kText,
  kBlockBegin,
  kBlockEnd,
  kOutputBegin,
  kOutputEnd,
  kName,
  kString,
  kNumber,
  kOperator,
  kEnd
};

struct JinjaToken {
  JinjaTokenKind kind = JinjaTokenKind::kEnd;
  size_t offset = 0;
  std::string text;  // as written; of a string, what it stands for
};

// `source` with the newlines that Jinja sees: "\n" alone, and not one at the very end.
std::string normalized_jinja(std::string_view source);

// The words of a source, kEnd last. Throws JinjaSyntaxError.
std::vector<JinjaToken> lex_jinja(const std::string& source);

}  // namespace megatron
