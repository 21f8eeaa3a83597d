#include "megatron/transformer/config/detail/layer_list.h"

#include <charconv>
#include <variant>

namespace megatron {
namespace {

using List = std::vector<int64_t>;
using Value = std::variant<int64_t, List>;
using Parsed = std::optional<Value>;

constexpr size_t kLongestList = 100000;

// A parser by recursive descent; each function consumes what it has parsed.
//   sum      product {"+" product}
//   product  atom {"*" atom}
//   atom     number | "[" [sum {"," sum}] "]" | "(" sum ")"
class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  Parsed parse() {
    Parsed value = sum();
    skip_spaces();
    return rest_.empty() ? value : std::nullopt;
  }

 private:
  Parsed sum() { return chain('+', &Parser::product, &Parser::add); }
  Parsed product() { return chain('*', &Parser::atom, &Parser::multiply); }

  Parsed chain(char sign, Parsed (Parser::*operand)(), Parsed (*combine)(Value, Value)) {
    Parsed left = (this->*operand)();
    while (left && consume(sign)) {
      const Parsed right = (this->*operand)();
      left = right ? combine(std::move(*left), *right) : std::nullopt;
    }
    return left;
  }

  Parsed atom() {
    if (consume('(')) {
      Parsed inner = sum();
      return consume(')') ? inner : std::nullopt;
    }
    if (consume('[')) return list();
    int64_t number = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), number);
    if (error != std::errc{}) return std::nullopt;
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    return number;
  }

  Parsed list() {
    List entries;
    if (consume(']')) return entries;
    do {
      const Parsed entry = sum();
      if (!entry || !std::holds_alternative<int64_t>(*entry)) return std::nullopt;
      entries.push_back(std::get<int64_t>(*entry));
    } while (consume(','));
    return consume(']') ? Parsed(entries) : std::nullopt;
  }

  static Parsed add(Value a, Value b) {
    if (a.index() != b.index()) return std::nullopt;
    if (auto* number = std::get_if<int64_t>(&a)) {
      int64_t result = 0;
      if (__builtin_add_overflow(*number, std::get<int64_t>(b), &result)) return std::nullopt;
      return result;
    }
    List all = std::get<List>(std::move(a));
    const List& more = std::get<List>(b);
    if (all.size() + more.size() > kLongestList) return std::nullopt;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  static Parsed multiply(Value a, Value b) {
    if (std::holds_alternative<List>(b)) std::swap(a, b);
    if (std::holds_alternative<List>(b)) return std::nullopt;
    const int64_t times = std::get<int64_t>(b);
    if (auto* number = std::get_if<int64_t>(&a)) {
      int64_t result = 0;
      if (__builtin_mul_overflow(*number, times, &result)) return std::nullopt;
      return result;
    }
    const List& once = std::get<List>(a);
    List all;
    for (int64_t i = 0; i < times && !once.empty(); ++i) {
      if (all.size() + once.size() > kLongestList) return std::nullopt;
      all.insert(all.end(), once.begin(), once.end());
    }
    return all;
  }

  void skip_spaces() {
    while (rest_.starts_with(' ')) rest_.remove_prefix(1);
  }
  bool consume(char sign) {
    skip_spaces();
    const bool found = rest_.starts_with(sign);
    if (found) rest_.remove_prefix(1);
    skip_spaces();
    return found;
  }

  std::string_view rest_;
};

}  // namespace

std::optional<List> parse_layer_list(std::string_view text) {
  const Parsed value = Parser(text).parse();
  if (!value || !std::holds_alternative<List>(*value)) return std::nullopt;
  return std::get<List>(*value);
}

std::optional<int64_t> parse_layer_period(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc{} && end == text.data() + text.size();
  return whole && number > 0 && text.size() < 10 ? std::optional(number) : std::nullopt;
}

}  // namespace megatron
