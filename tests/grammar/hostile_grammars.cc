#include "tests/grammar/hostile_grammars.h"

#include <fstream>
#include <random>
#include <string>

namespace megatron {
namespace {

using Kind = GrammarKind;

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

// "x" inside `depth` pairs of brackets.
std::string nested(std::string_view open, std::string_view inner, std::string_view close,
                   int depth) {
  return repeated(open, depth) + std::string(inner) + repeated(close, depth);
}

void add_regexes(std::vector<GrammarText>& all) {
  const auto add = [&](std::string text) { all.push_back({Kind::kRegex, std::move(text)}); };
  for (const char* text : {"(a+)+$",
                           "(a*)*",
                           "(a|a)*",
                           "(a|aa)+$",
                           "(a|a?)+",
                           "((a+)+)+",
                           "(.*)*",
                           "(.*.*)*x",
                           "([a-z]+)*$",
                           "(a{1,50}){1,50}",
                           "((a{1,100}){1,100}){1,100}",
                           "a{1000000000}",
                           "a{0,2147483647}",
                           "a{99999999999999999999}",
                           "(a{1000}){1000}",
                           "x{0,65535}y{0,65535}",
                           "(x+x+)+y",
                           "(?:a+){2,}b",
                           ".{1,10000}",
                           "(.|\\n){0,100000}",
                           "[\\s\\S]*[\\s\\S]*[\\s\\S]*",
                           "(ab?)*b?a*",
                           "^(([a-z])+.)+[A-Z]([a-z])+$",
                           "(a+)(b+)(c+)(d+)(e+)(f+)(g+)(h+)",
                           "",
                           "(",
                           ")",
                           "[",
                           "]",
                           "[z-a]",
                           "a**",
                           "a{2,1}",
                           "a{-1}",
                           "a{",
                           "\\",
                           "\\x",
                           "\\u12",
                           "\\p{L}",
                           "\\b",
                           "\\1(a)",
                           "(?=a)b",
                           "(?<=a)b",
                           "(?P<n>a)",
                           "(?i)a",
                           "(?#c)",
                           "a|",
                           "|",
                           "()",
                           "()*",
                           "(|a)+",
                           "^",
                           "$",
                           "^$",
                           "a^b",
                           "a$b",
                           "[^]",
                           "[]",
                           "[\\]",
                           "[a-",
                           "[[:alpha:]]",
                           "\\d{3,}",
                           "(\\d+)*\\.(\\d+)*",
                           "\\w{5000}",
                           "(.{1,200}){1,200}"})
    add(text);
  for (const int depth : {8, 31, 32, 33, 1000, 20000}) {
    add(nested("(", "a", ")", depth));
    add(nested("(", "a", ")*", depth));
    add(nested("(a|", "b", ")+", depth));
    add(nested("(?:", "a", "){2}", depth));
  }
  add(std::string(10 << 20, 'a'));
  add(repeated("(a+)+", 2 << 20));
  add(repeated("a?", 5000) + repeated("a", 5000));
  add(repeated("a|", 20000) + "a");
  add(repeated("[a-z]", 10000));
  add(repeated("(a|b)", 3000));
  add(repeated("\xf0\x9f\x98\x80", 10000));
  add("\xff\xfe");
  add(std::string("a\0b", 3));
  for (int i = 1; i <= 12; ++i) add(repeated("(a{1,20}){1,20}", i));
}

void add_schemas(std::vector<GrammarText>& all) {
  const auto add = [&](std::string text) { all.push_back({Kind::kJsonSchema, std::move(text)}); };
  for (
      const char* text :
      {R"({"$ref": "#"})",
       R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})",
       R"({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})",
       R"({"$ref": "#/nowhere"})",
       R"({"$ref": "http://example.com/schema.json"})",
       R"({"$ref": "file:///etc/passwd"})",
       R"({"$ref": 1})",
       R"({"anyOf": [{"$ref": "#"}]})",
       R"({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})",
       R"({"type": "array", "items": {"$ref": "#"}})",
       R"({"type": "array", "items": {"$ref": "#"}, "minItems": 1})",
       R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})",
       R"({"type": "string", "maxLength": 2147483647})",
       R"({"type": "string", "minLength": 1000000})",
       R"({"type": "string", "minLength": 5, "maxLength": 2})",
       R"({"type": "string", "maxLength": -1})",
       R"({"type": "string", "maxLength": 1e300})",
       R"({"type": "string", "maxLength": 99999999999999999999})",
       R"({"type": "array", "minItems": 1000000000})",
       R"({"type": "array", "maxItems": 1000000000})",
       R"({"type": "array", "minItems": 10000, "items": {"type": "integer"}})",
       R"({"type": "object", "minProperties": 100000})",
       R"({"type": "object", "maxProperties": 100000})",
       R"({"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807})",
       R"({"type": "integer", "minimum": 1e400})",
       R"({"type": "integer", "minimum": 5, "maximum": 1})",
       R"({"type": "integer", "minimum": 123456789012345678, "maximum": 987654321098765432})",
       R"({"type": "number", "minimum": 1e-300, "maximum": 1e300})",
       R"({"type": "integer", "multipleOf": 1000003})",
       R"({"type": "integer", "multipleOf": 0})",
       R"({"type": "number", "multipleOf": 1e-10})",
       R"({"type": "string", "pattern": "(a+)+$"})",
       R"({"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"})",
       R"({"type": "string", "pattern": "("})",
       R"j({"type": "string", "pattern": "(?=a)"})j",
       R"({"type": "string", "format": "no-such-format"})",
       R"({"type": "unknown"})",
       R"({"type": []})",
       R"({"type": 1})",
       R"({"enum": []})",
       R"({"enum": 1})",
       R"({"anyOf": []})",
       R"({"oneOf": [{}, {}]})",
       R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})",
       R"({"allOf": []})",
       R"({"allOf": [{"type": "string"}, {"type": "integer"}]})",
       R"({"not": {}})",
       R"({"if": {}, "then": {}})",
       R"({"uniqueItems": true, "type": "array"})",
       R"({"contains": {}})",
       R"({"properties": 1})",
       R"({"properties": {"a": 1}})",
       R"({"required": "a"})",
       R"({"required": ["not there"], "type": "object", "additionalProperties": false})",
       R"({"items": 1})",
       R"({"additionalProperties": 1})",
       R"({"patternProperties": {"(": {}}})",
       R"({"patternProperties": {"(a+)+$": {"type": "integer"}}})",
       R"({"propertyNames": {"pattern": "(a*)*"}})",
       R"({"prefixItems": {}})",
       R"({"$defs": 1, "$ref": "#/$defs/a"})",
       R"(false)",
       R"(null)",
       R"(1)",
       R"("x")",
       R"([])",
       R"({)",
       R"({"a")",
       "",
       R"({"type": "string"} x)",
       R"({"type": "string", "type": "integer"})",
       "{\"type\": \"\xff\"}",
       R"({"const": 1e999})",
       R"({"const": "\ud800"})"})
    add(text);
  for (const int depth : {8, 14, 31, 33, 1000, 100000}) {
    add(nested(R"({"type": "array", "items": )", "{}", "}", depth));
    add(nested(R"({"anyOf": [)", "{}", "]}", depth));
    add(nested(R"({"properties": {"a": )", "{}", "}, \"required\": [\"a\"]}", depth));
    add(nested("[", "", "]", depth));
    add(nested(R"({"const": )", "1", "}", depth));
  }
  for (const int count : {100, 1000, 3000}) {
    std::string values, properties, any, required;
    for (int i = 0; i < count; ++i) {
      values += cat(i > 0 ? ", " : "", "\"value ", i, "\"");
      properties += cat(i > 0 ? ", " : "", "\"p", i, "\": {\"type\": \"string\"}");
      required += cat(i > 0 ? ", " : "", "\"p", i, "\"");
      any += cat(i > 0 ? ", " : "", "{\"const\": ", i, "}");
    }
    add("{\"enum\": [" + values + "]}");
    add("{\"type\": \"object\", \"properties\": {" + properties + "}}");
    add("{\"type\": \"object\", \"properties\": {" + properties + "}, \"required\": [" + required +
        "]}");
    add("{\"anyOf\": [" + any + "]}");
  }
  // Each definition holds the next one twice: 2^n uses.
  for (const int count : {5, 20, 60, 200}) {
    std::string definitions;
    for (int i = 0; i < count; ++i)
      definitions +=
          cat("\"d", i, R"(": {"type": "object", "properties": {"a": {"$ref": "#/$defs/d)", i + 1,
              R"("}, "b": {"$ref": "#/$defs/d)", i + 1, "\"}}}, ");
    add("{\"$defs\": {" + definitions +
        cat("\"d", count, R"(": {"type": "null"}}, "$ref": "#/$defs/d0"})"));
  }
  add(std::string(10 << 20, ' ') + "{}");
  add("{\"enum\": [\"" + std::string(10 << 20, 'x') + "\"]}");
  add("{\"enum\": [\"" + std::string(60000, 'x') + "\"]}");
  add("{\"type\": \"object\", \"properties\": {\"" + std::string(60000, 'k') + "\": {}}}");
}

void add_others(std::vector<GrammarText>& all) {
  const auto ebnf = [&](std::string text) { all.push_back({Kind::kEbnf, std::move(text)}); };
  for (const char* text : {"root ::= root",
                           "root ::= root \"a\"",
                           "root ::= \"a\" root",
                           "root ::= root root | \"a\"",
                           "root ::= a\na ::= b\nb ::= a",
                           "root ::= a a a a a a a a\na ::= \"x\" | \"\" | a a",
                           "root ::= (root)*",
                           "root ::= (\"\")*",
                           "root ::= \"\"",
                           "root ::= missing",
                           "x ::= \"a\"",
                           "",
                           "root",
                           "root ::=",
                           "root ::= \"a",
                           "root ::= [a",
                           "root ::= (",
                           "root ::= \"a\"\nroot ::= \"b\"",
                           "root ::= \"a\"{1,1000000000}",
                           "root ::= (\"a\" | \"b\"){1000} (\"c\"){1000}",
                           "root ::= [^]*",
                           "root ::= \"\\xff\"",
                           "root ::= .",
                           "root ::= \"a\"{5,2}",
                           "root ::= [a-z]{0,100000}",
                           "root ::= (=\"a\") \"b\"",
                           "root ::= \"a\" (= \"b\")"})
    ebnf(text);
  for (const int depth : {31, 33, 5000}) {
    ebnf("root ::= " + nested("(", "\"a\"", ")", depth));
    ebnf("root ::= " + nested("(", "\"a\"", ")*", depth));
  }
  for (const int count : {50, 500}) {
    std::string rules = "root ::= r0\n";
    for (int i = 0; i < count; ++i)
      rules += cat("r", i, " ::= r", i + 1, " r", i + 1, " | \"a\"\n");
    ebnf(rules + cat("r", count, " ::= \"b\"\n"));
  }
  ebnf(repeated("root ::= \"a\"\n", 4000));
  ebnf("root ::= " + repeated("\"a\" | ", 9000) + "\"b\"");
  const auto tag = [&](std::string text) {
    all.push_back({Kind::kStructuralTag, std::move(text)});
  };
  for (
      const char* text :
      {R"({})", R"({"type": "structural_tag"})", R"({"type": "structural_tag", "format": {}})",
       R"({"type": "structural_tag", "format": {"type": "no_such"}})",
       R"({"type": "structural_tag", "format": {"type": "regex", "pattern": "(a+)+$"}})",
       R"({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [], "tags": []}})",
       R"({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [""], "tags": []}})",
       R"({"type": "structural_tag", "format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}})",
       R"({"type": "structural_tag", "format": {"type": "sequence", "elements": []}})",
       R"({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}})",
       R"({"type": "structural_tag", "format": {"type": "repeat", "min": 0, "max": 1000000000, "content": {"type": "any_text"}}})"})
    tag(text);
}

// Valid schemas with a few bytes changed.
void add_mutations(std::vector<GrammarText>& all, size_t count) {
  std::ifstream in(MEGATRON_SOURCE_DIR "/tests/grammar/schemas.jsonl");
  std::vector<std::string> schemas;
  for (std::string line; std::getline(in, line);) schemas.push_back(line);
  std::mt19937_64 random(7);
  static const char* const kTokens[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"",
                                        "null",
                                        "-1",
                                        "1e9",
                                        "\"$ref\": \"#\", ",
                                        "\"type\"",
                                        "true",
                                        "99999999999",
                                        "(a+)+"};
  while (all.size() < count) {
    std::string text = schemas[random() % schemas.size()];
    for (uint64_t edits = 1 + random() % 3; edits > 0 && !text.empty(); --edits) {
      const size_t at = random() % text.size();
      if (random() % 3 == 0)
        text.erase(at, 1 + random() % 8);
      else
        text.insert(at, kTokens[random() % std::size(kTokens)]);
    }
    all.push_back({Kind::kJsonSchema, text});
  }
}

}  // namespace

std::vector<GrammarText> hostile_grammars() {
  std::vector<GrammarText> all;
  add_regexes(all);
  add_schemas(all);
  add_others(all);
  add_mutations(all, 500);
  return all;
}

}  // namespace megatron
