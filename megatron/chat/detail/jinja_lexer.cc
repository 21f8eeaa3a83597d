#include "megatron/chat/detail/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/chat/detail/jinja_value.h"
#include "megatron/chat/python_text.h"

namespace megatron {

void jinja_syntax_error(size_t offset, std::string message) {
  throw JinjaSyntaxError{offset, std::move(message)};
}

namespace {

using Token = JinjaToken;
using TokenKind = JinjaTokenKind;

bool is_blank(char c) { return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// The value of a hexadecimal or octal escape of up to `count` digits at `at`, which is advanced
// past it.
std::optional<uint32_t> escaped_number(std::string_view text, size_t& at, size_t count, int base) {
  const size_t end = std::min(text.size(), at + count);
  uint32_t value = 0;
  const auto result = std::from_chars(text.data() + at, text.data() + end, value, base);
  if (result.ec != std::errc() || (base == 16 && result.ptr != text.data() + at + count))
    return std::nullopt;
  at = static_cast<size_t>(result.ptr - text.data());
  return value;
}

// Decodes the text between the quotes of a Python string.
std::string unescaped(std::string_view text, size_t offset) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i++];
      continue;
    }
    const char c = text[i + 1];
    i += 2;
    constexpr std::string_view kFrom = "\\'\"abfnrtv", kTo = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t known = kFrom.find(c); known != std::string_view::npos) {
      out += kTo[known];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const std::optional<uint32_t> code = escaped_number(text, i,
                                                          c == 'x'   ? 2
                                                          : c == 'u' ? 4
                                                                     : 8,
                                                          16);
      if (!code || *code > 0x10ffff || (*code >= 0xd800 && *code < 0xe000))
        jinja_syntax_error(offset, cat("the string has a \\", c, " escape that is no character"));
      python_append_code_point(*code, out);
    } else if (c >= '0' && c < '8') {
      --i;
      python_append_code_point(*escaped_number(text, i, 3, 8), out);
    } else if (c == '\n') {
      continue;  // a continued line
    } else {
      out += '\\';
      out += c;
    }
  }
  return out;
}

class Lexer {
 public:
  explicit Lexer(const std::string& source) : source_(source) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = next_tag();
      if (tag == std::string::npos) {
        add_text(at_, source_.size());
        at_ = source_.size();
        break;
      }
      const char kind = source_[tag + 1];
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      const bool has_sign = sign == '-' || sign == '+';
      add_text(at_, text_end(tag, kind, has_sign ? sign : '\0'));
      at_ = tag + (has_sign ? 3 : 2);
      if (kind == '#') {
        comment(tag);
      } else if (kind == '%' && at_word("raw")) {
        raw(tag);
      } else {
        code(tag, kind == '%');
      }
    }
    tokens_.push_back({TokenKind::kEnd, source_.size(), ""});
    return std::move(tokens_);
  }

 private:
  size_t next_tag() const {
    for (size_t i = source_.find('{', at_); i != std::string::npos; i = source_.find('{', i + 1)) {
      const char next = i + 1 < source_.size() ? source_[i + 1] : '\0';
      if (next == '%' || next == '{' || next == '#') return i;
    }
    return std::string::npos;
  }

  // Where the text before a tag ends: "-" removes white space; lstrip_blocks removes blanks before
  // a statement or comment on its line.
  size_t text_end(size_t tag, char kind, char sign) const {
    size_t end = tag;
    if (sign == '-') {
      while (end > at_ && is_blank(source_[end - 1])) --end;
    } else if (sign != '+' && kind != '{') {
      const size_t newline = tag > at_ ? source_.rfind('\n', tag - 1) : std::string::npos;
      const bool inside = newline != std::string::npos && newline >= at_;
      const size_t line = inside ? newline + 1 : at_;
      const bool at_line_start = inside || at_ == 0 || source_[at_ - 1] == '\n';
      if (at_line_start &&
          std::all_of(source_.begin() + static_cast<std::ptrdiff_t>(line),
                      source_.begin() + static_cast<std::ptrdiff_t>(tag), is_blank))
        end = line;
    }
    return end;
  }

  void add_text(size_t begin, size_t end) {
    if (end > begin)
      tokens_.push_back({TokenKind::kText, begin, source_.substr(begin, end - begin)});
  }

  void skip_blanks() {
    while (at_ < source_.size() && is_blank(source_[at_])) ++at_;
  }

  bool starts(std::string_view text) const { return source_.compare(at_, text.size(), text) == 0; }

  // If the tag ends here with `close` ("%}"), moves past it and the white space that it removes.
  bool ends(std::string_view close, bool takes_newline) {
    const char sign = source_[at_];
    const bool has_sign = (sign == '-' || (sign == '+' && takes_newline)) &&
                          source_.compare(at_ + 1, close.size(), close) == 0;
    if (!has_sign && !starts(close)) return false;
    at_ += close.size() + (has_sign ? 1 : 0);
    if (has_sign && sign == '-') {
      skip_blanks();
    } else if (!has_sign && takes_newline && at_ < source_.size() && source_[at_] == '\n') {
      ++at_;
    }
    return true;
  }

  void comment(size_t tag) {
    for (; at_ < source_.size(); ++at_)
      if (ends("#}", true)) return;
    jinja_syntax_error(tag, "a comment {# is not closed");
  }

  // Whether the tag consists only of this word.
  bool at_word(std::string_view word) const {
    size_t i = at_;
    while (i < source_.size() && is_blank(source_[i])) ++i;
    if (source_.compare(i, word.size(), word) != 0) return false;
    i += word.size();
    while (i < source_.size() && is_blank(source_[i])) ++i;
    if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) ++i;
    return source_.compare(i, 2, "%}") == 0;
  }

  void raw(size_t tag) {
    at_ = source_.find("%}", at_);
    const bool strips = source_[at_ - 1] == '-';
    at_ += 2;
    if (strips) skip_blanks();
    const size_t begin = at_;
    for (size_t i = source_.find("{%", at_); i != std::string::npos;
         i = source_.find("{%", i + 1)) {
      const char sign = i + 2 < source_.size() ? source_[i + 2] : '\0';
      const bool has_sign = sign == '-' || sign == '+';
      at_ = i + (has_sign ? 3 : 2);
      if (!at_word("endraw")) continue;
      at_ = begin;
      const size_t end = text_end(i, '%', has_sign ? sign : '\0');
      add_text(begin, end);
      at_ = source_.find("endraw", i) + 6;
      while (at_ < source_.size() && !ends("%}", true)) ++at_;
      return;
    }
    jinja_syntax_error(tag, "{% raw %} is not closed by {% endraw %}");
  }

  void code(size_t tag, bool block) {
    tokens_.push_back({block ? TokenKind::kBlockBegin : TokenKind::kOutputBegin, tag, ""});
    std::vector<char> open;  // brackets
    for (;;) {
      skip_blanks();
      if (at_ >= source_.size())
        jinja_syntax_error(
            tag, block ? "a statement {% is not closed" : "an expression {{ is not closed");
      const size_t begin = at_;
      if (open.empty() && ends(block ? "%}" : "}}", block)) {
        tokens_.push_back({block ? TokenKind::kBlockEnd : TokenKind::kOutputEnd, begin, ""});
        return;
      }
      token(open);
    }
  }

  void token(std::vector<char>& open) {
    const char c = source_[at_];
    if (starts_name(c)) return name();
    if (is_digit(c)) return number();
    if (c == '"' || c == '\'') return string();
    constexpr std::array<std::string_view, 25> kOperators = {
        "**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "<",
        ">",  "=",  "(",  ")",  "[",  "]",  "{", "}", ",", ":", ".", "|"};
    for (const std::string_view op : kOperators) {
      if (!starts(op)) continue;
      if (op == "(" || op == "[" || op == "{")
        open.push_back(op[0] == '(' ? ')' : op[0] == '[' ? ']' : '}');
      if (op == ")" || op == "]" || op == "}") {
        if (open.empty() || open.back() != op[0]) jinja_syntax_error(at_, cat("unexpected ", op));
        open.pop_back();
      }
      tokens_.push_back({TokenKind::kOperator, at_, std::string(op)});
      at_ += op.size();
      return;
    }
    jinja_syntax_error(at_, cat("unexpected character ", source_.substr(at_, 1)));
  }

  void name() {
    const size_t begin = at_;
    while (at_ < source_.size() && (starts_name(source_[at_]) || is_digit(source_[at_]))) ++at_;
    tokens_.push_back({TokenKind::kName, begin, source_.substr(begin, at_ - begin)});
  }

  void number() {
    const size_t begin = at_;
    const auto digits = [&] {
      while (at_ < source_.size() &&
             (is_digit(source_[at_]) ||
              (source_[at_] == '_' && at_ + 1 < source_.size() && is_digit(source_[at_ + 1]))))
        ++at_;
    };
    digits();
    const auto digit_at = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
    if (at_ < source_.size() && source_[at_] == '.' && digit_at(at_ + 1)) {
      ++at_;
      digits();
    }
    if (at_ < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
      const bool sign =
          at_ + 1 < source_.size() && (source_[at_ + 1] == '+' || source_[at_ + 1] == '-');
      if (digit_at(at_ + (sign ? 2 : 1))) {
        at_ += sign ? 2 : 1;
        digits();
      }
    }
    std::string text = source_.substr(begin, at_ - begin);
    std::erase(text, '_');
    tokens_.push_back({TokenKind::kNumber, begin, std::move(text)});
  }

  void string() {
    const size_t begin = at_;
    const char quote = source_[at_++];
    while (at_ < source_.size() && source_[at_] != quote) at_ += source_[at_] == '\\' ? 2 : 1;
    if (at_ >= source_.size()) jinja_syntax_error(begin, "a string is not closed");
    const std::string_view inside = std::string_view(source_).substr(begin + 1, at_ - begin - 1);
    tokens_.push_back({TokenKind::kString, begin, unescaped(inside, begin)});
    ++at_;
  }

  const std::string& source_;
  size_t at_ = 0;
  std::vector<Token> tokens_;
};

}  // namespace

std::string normalized_jinja(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

std::vector<JinjaToken> lex_jinja(const std::string& source) { return Lexer(source).run(); }

}  // namespace megatron
