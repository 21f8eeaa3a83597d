// The lexer of chat templates.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// An error at a position of the source.
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
  std::string text;  // as written; of a string, its value
};

// `source` with newlines normalised as by Jinja: only "\n", and none at the very end.
std::string normalized_jinja(std::string_view source);

// The tokens of a source, kEnd last. Throws JinjaSyntaxError.
std::vector<JinjaToken> lex_jinja(const std::string& source);

}  // namespace megatron
