// Checks the claims of flag table rows: against the sources, the names of the tests, and whether
// other flags are accepted in the same run.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/training/arguments/flag_table.h"

namespace megatron {

// The program's files under megatron/ and tools/, and the names of its tests.
struct SourceTree {
  // Text by path, without comments; without the flag table itself
  std::map<std::string, std::string> code;
  std::set<std::string> tests;   // "Suite.Name"
  std::set<std::string> fields;  // of the configuration
  static SourceTree read(const std::string& root);
};

struct Answer {
  enum class Kind { kField, kAccepted, kRefused };
  Kind kind;
  std::string reason;
};

// Parses the same run with only this flag added.
using Ask = std::function<Answer(const std::string& flag)>;

// What is wrong with a row's answer to one of its spellings; empty: nothing.
std::string fault_of(const KnownFlag& row, const std::string& spelling, const Answer& answer,
                     const Ask& ask, const SourceTree& tree);

// Whether the identifier occurs in a file other than `owners`.
bool is_read_outside(const SourceTree& tree, std::string_view identifier,
                     const std::set<std::string>& owners);

// The definitions of the functions of that name in a file of the tree, from the name to the end of
// the body; "": none.
std::string function_body(const SourceTree& tree, const std::string& path, const std::string& name);

}  // namespace megatron
