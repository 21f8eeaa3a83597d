// Forms of grammars; also for the shared library that compiles them, which is C++17.
#pragma once

#include <cstdint>

namespace megatron {

// Numbers of the library's interface.
enum class GrammarKind : int32_t {
  kJson,           // any JSON; the text is empty
  kJsonSchema,     // values of a JSON schema
  kRegex,          // what the whole text matches
  kEbnf,           // the rule "root"
  kStructuralTag,  // xgrammar's structural tags, JSON
};

}  // namespace megatron
