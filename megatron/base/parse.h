// Visitors over Config fields: command line, YAML, JSON, --help, Markdown.
//
// A value is taken from the command line, else from --config FILE (YAML), else the default. All violations (unknown flags,
// bad values, validate()) are reported together in one UsageError.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

// What a flag that no field owns means (the rest of Megatron's flags; see training/flag_table.h).
struct KnownFlag {
  enum class Kind { kAlreadySo, kRefused };
  std::string_view flag;    // "--transformer-impl"
  Kind kind;
  std::string_view reason;  // why it is already so, or why it is refused
  int min_values = 0;       // how many values it takes
  int max_values = 0;       // -1: any number
};

struct ParseOptions {
  std::span<const KnownFlag> known = {};  // flags that are accepted as already so, or refused with a reason
  bool allow_config_file = true;          // --config FILE
  // Called after parsing and before validation: derives defaults from other values.
  std::function<void()> finalize;
};

struct ParseResult {
  std::vector<std::string> given;                             // names of the fields given on the command line or in the file
  std::vector<std::pair<std::string, std::string>> already_so;  // flag, reason
  bool help = false;                                          // --help was given; nothing was validated
};

// Parses argv[1..] into the configs. Throws UsageError with every violation.
ParseResult parse_flags(std::span<Config* const> configs, int argc, const char* const* argv,
                        const ParseOptions& options = {});

// Reads "name: value" pairs of a YAML file (as written by to_yaml) into the configs.
void read_yaml(std::span<Config* const> configs, const std::string& path);

std::string help_text(std::string_view usage, std::span<Config* const> configs);
std::string to_yaml(std::span<Config* const> configs);
std::string to_json(std::span<Config* const> configs);  // one object, fields in order
// Rows "| `--flag` | type | default | help |" under a heading per group.
std::string to_markdown(std::span<Config* const> configs);

// The nearest of `names` to `word` by edit distance, or "" when none is near.
std::string nearest(std::string_view word, std::span<const std::string> names);

}  // namespace megatron
