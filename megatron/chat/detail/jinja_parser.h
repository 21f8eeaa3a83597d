// The parser of chat templates: Jinja as `transformers` sets it up (trim_blocks, lstrip_blocks,
// loop controls, {% generation %}), as trees of expressions and statements.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/chat/detail/jinja_lexer.h"
#include "megatron/chat/detail/jinja_value.h"

namespace megatron {

struct JinjaExpression;
struct JinjaStatement;
using JinjaExpressionPtr = std::unique_ptr<JinjaExpression>;
using JinjaBody = std::vector<std::unique_ptr<JinjaStatement>>;

struct JinjaExpression {
  enum class Kind {
    kConstant,   // constant
    kName,       // name
    kList,       // operands
    kTuple,      // operands
    kDict,       // operands: key, value, key, value, ...
    kNot,        // operands[0]
    kNegative,   // operands[0]
    kPositive,   // operands[0]
    kAnd,        // operands[0], operands[1]
    kOr,         //
    kCompare,    // operands[0] names[0] operands[1] names[1] operands[2] ...
    kBinary,     // operands[0] name operands[1]
    kAttribute,  // operands[0].name
    kItem,       // operands[0][operands[1]]
    kSlice,      // operands[0][operands[1]:operands[2]:operands[3]], null where omitted
    kCall,       // operands[0](operands[1], ..., named)
    kFilter,     // operands[0] | name(operands[1], ..., named)
    kTest,       // operands[0] is name(operands[1], ..., named)
    kSpread,     // among arguments: *operands[0] or **operands[0], by name
    kCondition,  // operands[0] if operands[1] else operands[2], which may be null
  };
  Kind kind = Kind::kConstant;
  size_t offset = 0;  // position in the source
  int depth = 1;
  JinjaValue constant;
  std::string name;
  std::vector<std::string> names;
  std::vector<JinjaExpressionPtr> operands;
  std::vector<std::pair<std::string, JinjaExpressionPtr>> named;
};

struct JinjaStatement {
  enum class Kind {
    kText,    // text
    kOutput,  // {{ expressions[0] }}
    kIf,      // expressions[i] guards bodies[i]; one body more: else
    kFor,  // target in expressions[0], if expressions[1] unless null; bodies[0], bodies[1] is else
           // or empty
    kSet,  // target = expressions[0]
    // target = bodies[0] filtered by expressions[0] (a filter of the name "") unless null
    kSetBlock,
    kMacro,       // name(parameters), bodies[0]
    kCall,        // {% call(parameters) expressions[0] %} bodies[0]
    kFilter,      // bodies[0] filtered by expressions[0]
    kWith,        // names = expressions, bodies[0]
    kGeneration,  // bodies[0]: text written by the model
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  size_t offset = 0;
  bool recursive = false;
  bool uses_loop = false;  // its bodies mention `loop`
  std::string text;
  std::string name;
  JinjaExpressionPtr target;
  std::vector<JinjaExpressionPtr> expressions;
  std::vector<JinjaBody> bodies;
  std::vector<std::pair<std::string, JinjaExpressionPtr>> parameters;  // with defaults, or null
};

// The name that stands for the body's text in the filter of a kSetBlock or kFilter.
inline constexpr const char* kJinjaBlockText = "(body)";

// Parses a normalized source. Throws JinjaSyntaxError.
JinjaBody parse_jinja(const std::string& source);

}  // namespace megatron
