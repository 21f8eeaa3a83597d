#include "megatron/chat/detail/jinja_parser.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr int kDeepestSyntax = 200;  // nesting of expressions and statements

using Token = JinjaToken;
using TokenKind = JinjaTokenKind;
using Kind = JinjaExpression::Kind;
using Statement = JinjaStatement;
using ExpressionPtr = JinjaExpressionPtr;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  JinjaBody run() {
    JinjaBody body = parse_body({});
    if (token().kind != TokenKind::kEnd)
      jinja_syntax_error(token().offset, cat("{% ", tokens_[at_ + 1].text, " %} ends nothing"));
    return body;
  }

 private:
  // Counts the recursion depth of the parser.
  class Nesting {
   public:
    Nesting(int& depth, size_t offset) : depth_(depth) {
      if (++depth_ > kDeepestSyntax) jinja_syntax_error(offset, "is nested too deeply");
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
      jinja_syntax_error(token().offset,
                         cat("found ", described(), " in ", where, ", expected ", op));
  }
  std::string expect_name(std::string_view where) {
    if (token().kind != TokenKind::kName)
      jinja_syntax_error(token().offset,
                         cat("found ", described(), " in ", where, ", expected a name"));
    return tokens_[at_++].text;
  }
  void expect_end(std::string_view where) {
    if (token().kind != TokenKind::kBlockEnd)
      jinja_syntax_error(token().offset,
                         cat("found ", described(), " in ", where, ", expected its end"));
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
    if (out->depth > 2 * kDeepestSyntax) jinja_syntax_error(out->offset, "is nested too deeply");
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
    jinja_syntax_error(first.offset, cat("found ", described(), ", expected a value"));
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
        jinja_syntax_error(token.offset, cat("the number ", token.text, " is too large"));
      return constant(token.offset, value);
    }
    double value = 0;
    std::from_chars(begin, end, value);
    return constant(token.offset, value);
  }

  // Values separated by commas; a single one is not a tuple.
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
      jinja_syntax_error(offset, cat("found ", described(), ", expected a value"));
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
    if (!slice && !parts[1]) jinja_syntax_error(offset, "the subscript is empty");
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
        if (!call.named.empty())
          jinja_syntax_error(token().offset, "a positional argument follows a named one");
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

  // Filters, tests, and calls after them.
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

  // Parses up to one of the words, which is not consumed.
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
          jinja_syntax_error(token().offset,
                             cat("found ", described(), " in an expression, expected its end"));
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
  // A word that can only end a statement.
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

  // Parses the body of a statement and its {% endword %}.
  JinjaBody closed_body(std::string_view end, size_t offset) {
    JinjaBody body = parse_body({end});
    close(end, offset);
    return body;
  }
  void close(std::string_view end, size_t offset) {
    if (!at_end_word({end})) {
      const bool over = token().kind == TokenKind::kEnd;
      jinja_syntax_error(
          over ? offset : token().offset,
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
      if (loops_ == 0) jinja_syntax_error(offset, cat("{% ", word, " %} outside a loop"));
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
    jinja_syntax_error(offset,
                       cat("the statement {% ", word, " %} is not supported in chat templates"));
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

  // A name, names separated by commas, or (with `attributes`) a name with an attribute.
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
      jinja_syntax_error(token().offset, cat("found ", described(), " in {% for %}, expected in"));
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
        jinja_syntax_error(token().offset, cat("the parameter ", name,
                                               " without a default follows one with a default"));
      out.parameters.emplace_back(std::move(name), std::move(value));
      if (!accept(",")) break;
    }
    expect(")", where);
  }

  // Loops around a macro are not loops inside it.
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
    if (out->expressions[0]->kind != Kind::kCall)
      jinja_syntax_error(offset, "{% call %} needs a call");
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

JinjaBody parse_jinja(const std::string& source) { return Parser(lex_jinja(source)).run(); }

}  // namespace megatron
