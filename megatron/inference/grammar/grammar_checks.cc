// What is refused before a grammar is compiled.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "megatron/base/utf8.h"
#include "megatron/inference/grammar.h"

namespace megatron {
namespace {

using Json = nlohmann::json;

template <class... Args>
void require(bool condition, const Args&... problem) {
  if (!condition) throw GrammarError(cat(problem...));
}

// Keywords that xgrammar reads over, which would make the grammar accept too much.
constexpr std::array<std::string_view, 16> kUnbuilt = {"not",
                                                       "if",
                                                       "then",
                                                       "else",
                                                       "dependentRequired",
                                                       "dependentSchemas",
                                                       "dependencies",
                                                       "contains",
                                                       "minContains",
                                                       "maxContains",
                                                       "unevaluatedItems",
                                                       "unevaluatedProperties",
                                                       "$dynamicRef",
                                                       "$recursiveRef",
                                                       "contentSchema",
                                                       "$anchor"};

// Members whose value is a schema, a list of schemas, or an object of schemas.
constexpr std::array<std::string_view, 4> kSchemas = {"items", "additionalProperties",
                                                      "propertyNames", "additionalItems"};
constexpr std::array<std::string_view, 4> kLists = {"anyOf", "oneOf", "allOf", "prefixItems"};
constexpr std::array<std::string_view, 4> kObjects = {"properties", "patternProperties", "$defs",
                                                      "definitions"};

bool is_one_of(std::string_view word, const auto& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

void check_schema(const Json& schema) {
  if (!schema.is_object()) return;  // true and false are schemas, others xgrammar refuses
  for (const auto& [key, value] : schema.items()) {
    require(!is_one_of(key, kUnbuilt), "the keyword ", key, " is not built");
    require(key != "uniqueItems" || value == false, "the keyword uniqueItems is not built");
    if (is_one_of(key, kSchemas)) check_schema(value);
    if (is_one_of(key, kLists) || (key == "items" && value.is_array()))
      for (const Json& item : value) check_schema(item);
    if (is_one_of(key, kObjects) && value.is_object())
      for (const Json& item : value) check_schema(item);
  }
}

// The schemas inside of structural tags.
void check_tags(const Json& json) {
  const auto schema = json.is_object() ? json.find("json_schema") : json.end();
  if (schema != json.end()) return check_schema(*schema);
  if (!json.is_structured()) return;
  for (const Json& member : json) check_tags(member);
}

Json parse_bounded(const std::string& text, int most) {
  bool too_deep = false;
  const Json json = Json::parse(
      text,
      [&](int depth, Json::parse_event_t event, Json&) {
        const bool opens =
            event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
        too_deep |= opens && depth >= most;
        return !too_deep;
      },
      /*allow_exceptions=*/false);
  require(!too_deep, "is nested more than ", most, " deep");
  require(!json.is_discarded(), "is not JSON");
  return json;
}

// Of groups, classes and repetitions; escaped characters and quoted ones open nothing.
void check_nesting(const std::string& text, bool quotes, int most) {
  int depth = 0;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      ++i;
    } else if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '[') {
      quote = ']';  // a class of characters
    } else if (quotes && (c == '"' || c == '\'')) {
      quote = c;
    } else if (c == '(') {
      require(++depth <= most, "is nested more than ", most, " deep");
    } else if (c == ')') {
      --depth;
    }
  }
}

}  // namespace

void check_grammar(const GrammarText& grammar, const GrammarLimits& limits) {
  require(std::ssize(grammar.text) <= limits.text_bytes, "is ", grammar.text.size(),
          " bytes long, expected at most ", limits.text_bytes);
  require(is_valid_utf8(grammar.text), "is not UTF-8");
  require(grammar.text.find('\0') == grammar.text.npos, "holds a zero byte");
  switch (grammar.kind) {
    case GrammarKind::kJson:
      return;
    case GrammarKind::kJsonSchema:
      return check_schema(parse_bounded(grammar.text, limits.depth));
    case GrammarKind::kStructuralTag:
      return check_tags(parse_bounded(grammar.text, 2 * limits.depth));  // tags around a schema
    case GrammarKind::kRegex:
    case GrammarKind::kEbnf:
      return check_nesting(grammar.text, grammar.kind == GrammarKind::kEbnf, limits.depth);
  }
}

}  // namespace megatron
