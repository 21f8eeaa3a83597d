#include "megatron/chat/detail/jinja_parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr int kDeepest = 200;  // nesting of expressions and statements

[[noreturn]] void fail(size_t offset, std::string message) {
  throw JinjaSyntaxError{offset, std::move(message)};
}

// -- tokens

enum class TokenKind {
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

struct Token {
  TokenKind kind = TokenKind::kEnd;
  size_t offset = 0;
  std::string text;  // as written; of a string, what it stands for
};

bool is_blank(char c) { return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// The value of a hexadecimal or octal escape of up to `count` digits at `at`, which moves behind
// it.
std::optional<uint32_t> escaped_number(std::string_view text, size_t& at, size_t count, int base) {
  const size_t end = std::min(text.size(), at + count);
  uint32_t value = 0;
  const auto result = std::from_chars(text.data() + at, text.data() + end, value, base);
  if (result.ec != std::errc() || (base == 16 && result.ptr != text.data() + at + count))
    return std::nullopt;
  at = static_cast<size_t>(result.ptr - text.data());
  return value;
}

// What stands between the quotes of a Python string.
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
        fail(offset, cat("the string has a \\", c, " escape that is no character"));
      python_append_code_point(*code, out);
    } else if (c >= '0' && c < '8') {
      --i;
      python_append_code_point(*escaped_number(text, i, 3, 8), out);
    } else if (c == '\n') {
      continue;  // a line that goes on
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

  // Where the text before a tag ends: "-" takes white space away; lstrip_blocks, what stands before
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

  // If a tag ends here with `close` ("%}"), behind it and what it takes of the text that follows.
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
    fail(tag, "a comment {# is not closed");
  }

  // Whether the tag consists of this word alone.
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
    fail(tag, "{% raw %} is not closed by {% endraw %}");
  }

  void code(size_t tag, bool block) {
    tokens_.push_back({block ? TokenKind::kBlockBegin : TokenKind::kOutputBegin, tag, ""});
    std::vector<char> open;  // brackets
    for (;;) {
      skip_blanks();
      if (at_ >= source_.size())
        fail(tag, block ? "a statement {% is not closed" : "an expression {{ is not closed");
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
        if (open.empty() || open.back() != op[0]) fail(at_, cat("unexpected ", op));
        open.pop_back();
      }
      tokens_.push_back({TokenKind::kOperator, at_, std::string(op)});
      at_ += op.size();
      return;
    }
    fail(at_, cat("unexpected character ", source_.substr(at_, 1)));
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
    if (at_ >= source_.size()) fail(begin, "a string is not closed");
    const std::string_view inside = std::string_view(source_).substr(begin + 1, at_ - begin - 1);
    tokens_.push_back({TokenKind::kString, begin, unescaped(inside, begin)});
    ++at_;
  }

  const std::string& source_;
  size_t at_ = 0;
  std::vector<Token> tokens_;
};

// -- trees

using Kind = JinjaExpression::Kind;
using Statement = JinjaStatement;
using ExpressionPtr = JinjaExpressionPtr;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  JinjaBody run() {
    JinjaBody body = parse_body({});
    if (token().kind != TokenKind::kEnd)
      fail(token().offset, cat("{% ", tokens_[at_ + 1].text, " %} ends nothing"));
    return body;
  }

 private:
  // Counts how deep the parser is in itself.
  class Nesting {
   public:
    Nesting(int& depth, size_t offset) : depth_(depth) {
      if (++depth_ > kDeepest) fail(offset, "is nested too deeply");
    }
    ~Nesting() { --depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    int& depth_;
  };

  const Token& token() const { return tokens_[at_]; }
  bool is(std::string_view op) const {
    return token().kind == TokenKind::kOperator && token().text == op;
  }
  bool is_name(std::string_view name) const {
    return token().kind == TokenKind::kName && token().text == name;
  }
  bool accept(std::string_view op) { return is(op) && ++at_ > 0; }
  bool accept_name(std::string_view name) { return is_name(name) && ++at_ > 0; }
  std::string described() const {
    switch (token().kind) {
      case TokenKind::kBlockEnd:
        return "the end of the statement";
      case TokenKind::kOutputEnd:
        return "the end of the expression";
      case TokenKind::kEnd:
        return "the end of the template";
      case TokenKind::kString:
        return cat("the string '", token().text, "'");
      default:
        return token().text;
    }
  }
  void expect(std::string_view op, std::string_view where) {
    if (!accept(op))
      fail(token().offset, cat("found ", described(), " in ", where, ", expected ", op));
  }
  std::string expect_name(std::string_view where) {
    if (token().kind != TokenKind::kName)
      fail(token().offset, cat("found ", described(), " in ", where, ", expected a name"));
    return tokens_[at_++].text;
  }
  void expect_end(std::string_view where) {
    if (token().kind != TokenKind::kBlockEnd)
      fail(token().offset, cat("found ", described(), " in ", where, ", expected its end"));
    ++at_;
  }

  ExpressionPtr make(Kind kind, size_t offset, std::vector<ExpressionPtr> operands = {}) {
    auto out = std::make_unique<JinjaExpression>();
    out->kind = kind;
    out->offset = offset;
    out->operands = std::move(operands);
    return checked(std::move(out));
  }
  ExpressionPtr checked(ExpressionPtr out) {
    for (const ExpressionPtr& operand : out->operands)
      if (operand) out->depth = std::max(out->depth, operand->depth + 1);
    for (const auto& [name, value] : out->named)
      out->depth = std::max(out->depth, value->depth + 1);
    if (out->depth > 2 * kDeepest) fail(out->offset, "is nested too deeply");
    return out;
  }
  ExpressionPtr make(Kind kind, size_t offset, ExpressionPtr a, ExpressionPtr b = nullptr) {
    std::vector<ExpressionPtr> operands;
    operands.push_back(std::move(a));
    if (b) operands.push_back(std::move(b));
    return make(kind, offset, std::move(operands));
  }
  ExpressionPtr constant(size_t offset, JinjaValue value) {
    ExpressionPtr out = make(Kind::kConstant, offset);
    out->constant = std::move(value);
    return out;
  }

  // -- expressions, from the loosest binding to the tightest

  ExpressionPtr expression() { return condition(true); }

  ExpressionPtr condition(bool with_if) {
    const Nesting nesting(depth_, token().offset);
    ExpressionPtr value = disjunction();
    while (with_if && is_name("if")) {
      const size_t offset = tokens_[at_++].offset;
      std::vector<ExpressionPtr> operands;
      operands.push_back(std::move(value));
      operands.push_back(disjunction());
      operands.push_back(accept_name("else") ? condition(true) : nullptr);
      value = make(Kind::kCondition, offset, std::move(operands));
    }
    return value;
  }

  ExpressionPtr disjunction() {
    ExpressionPtr left = conjunction();
    while (is_name("or")) {
      const size_t offset = tokens_[at_++].offset;
      left = make(Kind::kOr, offset, std::move(left), conjunction());
    }
    return left;
  }

  ExpressionPtr conjunction() {
    ExpressionPtr left = negation();
    while (is_name("and")) {
      const size_t offset = tokens_[at_++].offset;
      left = make(Kind::kAnd, offset, std::move(left), negation());
    }
    return left;
  }

  ExpressionPtr negation() {
    if (!is_name("not")) return comparison();
    const Nesting nesting(depth_, token().offset);
    const size_t offset = tokens_[at_++].offset;
    return make(Kind::kNot, offset, negation());
  }

  ExpressionPtr comparison() {
    const size_t offset = token().offset;
    std::vector<ExpressionPtr> operands;
    std::vector<std::string> names;
    operands.push_back(sum());
    for (;;) {
      std::string op;
      if (token().kind == TokenKind::kOperator) {
        constexpr std::array<std::string_view, 6> kComparisons = {"==", "!=", "<", "<=", ">", ">="};
        if (std::find(kComparisons.begin(), kComparisons.end(), token().text) != kComparisons.end())
          op = token().text;
      } else if (is_name("in")) {
        op = "in";
      } else if (is_name("not") && tokens_[at_ + 1].kind == TokenKind::kName &&
                 tokens_[at_ + 1].text == "in") {
        op = "not in";
        ++at_;
      }
      if (op.empty()) break;
      ++at_;
      names.push_back(op);
      operands.push_back(sum());
    }
    if (names.empty()) return std::move(operands[0]);
    ExpressionPtr out = make(Kind::kCompare, offset, std::move(operands));
    out->names = std::move(names);
    return out;
  }

  template <class Next>
  ExpressionPtr binary(std::initializer_list<std::string_view> operators, const Next& next) {
    ExpressionPtr left = next();
    for (;;) {
      const bool here =
          token().kind == TokenKind::kOperator &&
          std::find(operators.begin(), operators.end(), token().text) != operators.end();
      if (!here) return left;
      const Token& op = tokens_[at_++];
      ExpressionPtr both = make(Kind::kBinary, op.offset, std::move(left), next());
      both->name = op.text;
      left = std::move(both);
    }
  }
  ExpressionPtr sum() {
    return binary({"+", "-"}, [this] { return concatenation(); });
  }
  ExpressionPtr concatenation() {
    return binary({"~"}, [this] { return product(); });
  }
  ExpressionPtr product() {
    return binary({"*", "/", "//", "%"}, [this] { return power(); });
  }
  ExpressionPtr power() {
    return binary({"**"}, [this] { return unary(true); });
  }

  ExpressionPtr unary(bool with_filter) {
    const Nesting nesting(depth_, token().offset);
    const size_t offset = token().offset;
    ExpressionPtr value;
    if (accept("-")) {
      value = make(Kind::kNegative, offset, unary(false));
    } else if (accept("+")) {
      value = make(Kind::kPositive, offset, unary(false));
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return with_filter ? filters(std::move(value)) : std::move(value);
  }

  ExpressionPtr primary() {
    const Token& first = token();
    switch (first.kind) {
      case TokenKind::kName:
        return name();
      case TokenKind::kString: {
        std::string text;
        while (token().kind == TokenKind::kString) text += tokens_[at_++].text;
        return constant(first.offset, JinjaValue(std::move(text)));
      }
      case TokenKind::kNumber:
        return number();
      default:
        break;
    }
    if (accept("(")) {
      ExpressionPtr inside = tuple(/*parentheses=*/true);
      expect(")", "parentheses");
      return inside;
    }
    if (accept("[")) return list(first.offset);
    if (accept("{")) return dict(first.offset);
    fail(first.offset, cat("found ", described(), ", expected a value"));
  }

  ExpressionPtr name() {
    const Token& token = tokens_[at_++];
    if (token.text == "true" || token.text == "True") return constant(token.offset, true);
    if (token.text == "false" || token.text == "False") return constant(token.offset, false);
    if (token.text == "none" || token.text == "None") return constant(token.offset, JinjaNone{});
    if (token.text == "loop") ++mentions_of_loop_;
    ExpressionPtr out = make(Kind::kName, token.offset);
    out->name = token.text;
    return out;
  }

  ExpressionPtr number() {
    const Token& token = tokens_[at_++];
    const char *begin = token.text.data(), *end = begin + token.text.size();
    if (token.text.find_first_of(".eE") == std::string::npos) {
      int64_t value = 0;
      if (std::from_chars(begin, end, value).ec != std::errc())
        fail(token.offset, cat("the number ", token.text, " is too large"));
      return constant(token.offset, value);
    }
    double value = 0;
    std::from_chars(begin, end, value);
    return constant(token.offset, value);
  }

  // Values with commas between them; one alone is itself.
  ExpressionPtr tuple(bool parentheses, bool with_if = true) {
    const size_t offset = token().offset;
    std::vector<ExpressionPtr> items;
    bool comma = false;
    while (!ends_tuple()) {
      items.push_back(condition(with_if));
      comma = accept(",");
      if (!comma) break;
    }
    if (items.size() == 1 && !comma) return std::move(items[0]);
    if (items.empty() && !parentheses)
      fail(offset, cat("found ", described(), ", expected a value"));
    return make(Kind::kTuple, offset, std::move(items));
  }
  bool ends_tuple() const {
    return is(")") || token().kind == TokenKind::kOutputEnd ||
           token().kind == TokenKind::kBlockEnd || is_name("in");
  }

  ExpressionPtr list(size_t offset) {
    std::vector<ExpressionPtr> items;
    while (!is("]")) {
      items.push_back(expression());
      if (!accept(",")) break;
    }
    expect("]", "a list");
    return make(Kind::kList, offset, std::move(items));
  }

  ExpressionPtr dict(size_t offset) {
    std::vector<ExpressionPtr> items;
    while (!is("}")) {
      items.push_back(expression());
      expect(":", "a dict");
      items.push_back(expression());
      if (!accept(",")) break;
    }
    expect("}", "a dict");
    return make(Kind::kDict, offset, std::move(items));
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    for (;;) {
      const size_t offset = token().offset;
      if (accept(".")) {
        if (token().kind == TokenKind::kNumber) {
          value = make(Kind::kItem, offset, std::move(value), number());
          continue;
        }
        value = make(Kind::kAttribute, offset, std::move(value));
        value->name = expect_name("an attribute");
      } else if (accept("[")) {
        value = subscript(offset, std::move(value));
      } else if (is("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(size_t offset, ExpressionPtr value) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(value));
    bool slice = false;
    for (int part = 0; part < 3; ++part) {
      parts.push_back(is(":") || is("]") ? nullptr : expression());
      if (!accept(":")) break;
      slice = true;
    }
    expect("]", "a subscript");
    if (!slice && !parts[1]) fail(offset, "the subscript is empty");
    if (slice) parts.resize(4);
    return make(slice ? Kind::kSlice : Kind::kItem, offset, std::move(parts));
  }

  void arguments(JinjaExpression& call) {
    expect("(", "a call");
    while (!is(")")) {
      if (is("*") || is("**")) {
        const Token& stars = tokens_[at_++];
        call.operands.push_back(make(Kind::kSpread, stars.offset, expression()));
        call.operands.back()->name = stars.text;
      } else if (token().kind == TokenKind::kName &&
                 tokens_[at_ + 1].kind == TokenKind::kOperator && tokens_[at_ + 1].text == "=") {
        std::string key = tokens_[at_].text;
        at_ += 2;
        call.named.emplace_back(std::move(key), expression());
      } else {
        if (!call.named.empty()) fail(token().offset, "a positional argument follows a named one");
        call.operands.push_back(expression());
      }
      if (!accept(",")) break;
    }
    expect(")", "a call");
  }

  ExpressionPtr call(ExpressionPtr callee) {
    const Nesting nesting(depth_, token().offset);
    ExpressionPtr out = make(Kind::kCall, token().offset, std::move(callee));
    arguments(*out);
    return checked(std::move(out));
  }

  // Filters, tests, and calls behind them.
  ExpressionPtr filters(ExpressionPtr value) {
    for (;;) {
      if (is("|")) {
        value = filter(std::move(value));
      } else if (is_name("is")) {
        value = test(std::move(value));
      } else if (is("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr filter(ExpressionPtr value) {
    expect("|", "a filter");
    return filter_name(std::move(value));
  }
  ExpressionPtr filter_name(ExpressionPtr value) {
    ExpressionPtr out = make(Kind::kFilter, token().offset, std::move(value));
    out->name = expect_name("a filter");
    if (is("(")) arguments(*out);
    return checked(std::move(out));
  }

  ExpressionPtr test(ExpressionPtr value) {
    const size_t offset = tokens_[at_++].offset;
    const bool negated = accept_name("not");
    ExpressionPtr out = make(Kind::kTest, offset, std::move(value));
    out->name = expect_name("a test");
    if (is("(")) {
      arguments(*out);
    } else if (starts_argument()) {
      out->operands.push_back(postfix(primary()));
    }
    out = checked(std::move(out));
    return negated ? make(Kind::kNot, offset, std::move(out)) : std::move(out);
  }
  bool starts_argument() const {
    if (token().kind == TokenKind::kName)
      return !is_name("else") && !is_name("or") && !is_name("and") && !is_name("is") &&
             !is_name("if") && !is_name("in") && !is_name("not");
    return token().kind == TokenKind::kString || token().kind == TokenKind::kNumber || is("[") ||
           is("{");
  }

  // -- statements

  bool at_end_word(std::initializer_list<std::string_view> ends) const {
    if (token().kind != TokenKind::kBlockBegin || tokens_[at_ + 1].kind != TokenKind::kName)
      return false;
    return std::find(ends.begin(), ends.end(), tokens_[at_ + 1].text) != ends.end();
  }

  // Up to one of the words, which is left to be read.
  JinjaBody parse_body(std::initializer_list<std::string_view> ends) {
    const Nesting nesting(depth_, token().offset);
    JinjaBody body;
    for (;;) {
      const size_t offset = token().offset;
      if (token().kind == TokenKind::kText) {
        auto text = statement(Statement::Kind::kText, offset);
        text->text = tokens_[at_++].text;
        body.push_back(std::move(text));
      } else if (token().kind == TokenKind::kOutputBegin) {
        ++at_;
        auto output = statement(Statement::Kind::kOutput, offset);
        output->expressions.push_back(tuple(/*parentheses=*/false));
        if (token().kind != TokenKind::kOutputEnd)
          fail(token().offset, cat("found ", described(), " in an expression, expected its end"));
        ++at_;
        body.push_back(std::move(output));
      } else if (token().kind == TokenKind::kBlockBegin && !at_end_word(ends) && !closes()) {
        ++at_;
        body.push_back(block(offset));
      } else {
        return body;
      }
    }
  }
  // A word that can only close something.
  bool closes() const {
    const std::string& word = tokens_[at_ + 1].text;
    return tokens_[at_ + 1].kind == TokenKind::kName &&
           (word.starts_with("end") || word == "else" || word == "elif");
  }

  std::unique_ptr<Statement> statement(Statement::Kind kind, size_t offset) {
    auto out = std::make_unique<Statement>();
    out->kind = kind;
    out->offset = offset;
    return out;
  }

  // The body of a statement, and its {% endword %}.
  JinjaBody closed_body(std::string_view end, size_t offset) {
    JinjaBody body = parse_body({end});
    close(end, offset);
    return body;
  }
  void close(std::string_view end, size_t offset) {
    if (!at_end_word({end})) {
      const bool over = token().kind == TokenKind::kEnd;
      fail(over ? offset : token().offset,
           cat("{% ", end.substr(3), " %} is not closed by {% ", end, " %}",
               over ? std::string() : cat(", found {% ", tokens_[at_ + 1].text, " %}")));
    }
    at_ += 2;
    expect_end(end);
  }

  std::unique_ptr<Statement> block(size_t offset) {
    const std::string word = expect_name("a statement");
    if (word == "if") return if_block(offset);
    if (word == "for") return for_block(offset);
    if (word == "set") return set_block(offset);
    if (word == "macro") return macro_block(offset);
    if (word == "generation") {
      auto out = statement(Statement::Kind::kGeneration, offset);
      expect_end("generation");
      out->bodies.push_back(closed_body("endgeneration", offset));
      return out;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) fail(offset, cat("{% ", word, " %} outside a loop"));
      expect_end(word);
      return statement(word == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue,
                       offset);
    }
    if (word == "with") return with_block(offset);
    if (word == "call") return call_block(offset);
    if (word == "filter") {
      auto out = statement(Statement::Kind::kFilter, offset);
      out->expressions.push_back(filter_chain(filter_name(block_text(offset))));
      expect_end("filter");
      out->bodies.push_back(closed_body("endfilter", offset));
      return out;
    }
    fail(offset, cat("the statement {% ", word, " %} is not supported in chat templates"));
  }

  ExpressionPtr block_text(size_t offset) {
    ExpressionPtr out = make(Kind::kName, offset);
    out->name = kJinjaBlockText;
    return out;
  }
  ExpressionPtr filter_chain(ExpressionPtr value) {
    while (is("|")) value = filter(std::move(value));
    return value;
  }

  std::unique_ptr<Statement> if_block(size_t offset) {
    auto out = statement(Statement::Kind::kIf, offset);
    for (;;) {
      out->expressions.push_back(tuple(false));
      expect_end("if");
      out->bodies.push_back(parse_body({"elif", "else", "endif"}));
      if (!at_end_word({"elif"})) break;
      at_ += 2;
    }
    if (at_end_word({"else"})) {
      at_ += 2;
      expect_end("else");
      out->bodies.push_back(parse_body({"endif"}));
    }
    close("endif", offset);
    return out;
  }

  // A name, names with commas, or (with `attributes`) a name with an attribute.
  ExpressionPtr target(bool attributes) {
    const size_t offset = token().offset;
    std::vector<ExpressionPtr> items;
    bool comma = false;
    for (;;) {
      if (accept("(")) {
        items.push_back(target(false));
        expect(")", "a target");
      } else {
        ExpressionPtr item = make(Kind::kName, token().offset);
        item->name = expect_name("a target");
        if (attributes && items.empty() && is(".")) {
          item = make(Kind::kAttribute, tokens_[at_++].offset, std::move(item));
          item->name = expect_name("a target");
        }
        items.push_back(std::move(item));
      }
      if (!accept(",")) break;
      comma = true;
      if (is_name("in") || is("=") || is(")")) break;
    }
    if (!comma) return std::move(items[0]);
    return make(Kind::kTuple, offset, std::move(items));
  }

  std::unique_ptr<Statement> for_block(size_t offset) {
    auto out = statement(Statement::Kind::kFor, offset);
    out->target = target(false);
    if (!accept_name("in"))
      fail(token().offset, cat("found ", described(), " in {% for %}, expected in"));
    out->expressions.push_back(tuple(false, /*with_if=*/false));
    out->expressions.push_back(accept_name("if") ? expression() : nullptr);
    out->recursive = accept_name("recursive");
    expect_end("for");
    const int mentions = mentions_of_loop_;
    ++loops_;
    out->bodies.push_back(parse_body({"else", "endfor"}));
    --loops_;
    out->uses_loop = mentions_of_loop_ > mentions;
    out->bodies.emplace_back();
    if (at_end_word({"else"})) {
      at_ += 2;
      expect_end("else");
      out->bodies[1] = parse_body({"endfor"});
    }
    close("endfor", offset);
    return out;
  }

  std::unique_ptr<Statement> set_block(size_t offset) {
    ExpressionPtr where = target(true);
    if (accept("=")) {
      auto out = statement(Statement::Kind::kSet, offset);
      out->target = std::move(where);
      out->expressions.push_back(tuple(false));
      expect_end("set");
      return out;
    }
    auto out = statement(Statement::Kind::kSetBlock, offset);
    out->target = std::move(where);
    out->expressions.push_back(is("|") ? filter_chain(block_text(offset)) : nullptr);
    expect_end("set");
    out->bodies.push_back(closed_body("endset", offset));
    return out;
  }

  void parameters(Statement& out, std::string_view where) {
    expect("(", where);
    while (!is(")")) {
      std::string name = expect_name(where);
      ExpressionPtr value = accept("=") ? expression() : nullptr;
      if (!value && !out.parameters.empty() && out.parameters.back().second)
        fail(token().offset,
             cat("the parameter ", name, " without a default follows one with a default"));
      out.parameters.emplace_back(std::move(name), std::move(value));
      if (!accept(",")) break;
    }
    expect(")", where);
  }

  // Loops outside a macro are not loops inside it.
  JinjaBody function_body(std::string_view end, size_t offset) {
    const int loops = std::exchange(loops_, 0);
    JinjaBody body = closed_body(end, offset);
    loops_ = loops;
    return body;
  }

  std::unique_ptr<Statement> macro_block(size_t offset) {
    auto out = statement(Statement::Kind::kMacro, offset);
    out->name = expect_name("a macro");
    parameters(*out, "a macro");
    expect_end("macro");
    out->bodies.push_back(function_body("endmacro", offset));
    return out;
  }

  std::unique_ptr<Statement> call_block(size_t offset) {
    auto out = statement(Statement::Kind::kCall, offset);
    if (is("(")) parameters(*out, "a call");
    out->expressions.push_back(expression());
    if (out->expressions[0]->kind != Kind::kCall) fail(offset, "{% call %} needs a call");
    expect_end("call");
    out->bodies.push_back(function_body("endcall", offset));
    return out;
  }

  std::unique_ptr<Statement> with_block(size_t offset) {
    auto out = statement(Statement::Kind::kWith, offset);
    while (token().kind != TokenKind::kBlockEnd) {
      std::string name = expect_name("with");
      expect("=", "with");
      out->parameters.emplace_back(std::move(name), expression());
      if (!accept(",")) break;
    }
    expect_end("with");
    out->bodies.push_back(closed_body("endwith", offset));
    return out;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  int mentions_of_loop_ = 0;
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

JinjaBody parse_jinja(const std::string& source) { return Parser(Lexer(source).run()).run(); }

}  // namespace megatron
