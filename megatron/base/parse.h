// Configs from and to text: command line, YAML, JSON, --help, Markdown.
//
// A value is taken from the command line, else from --config FILE (YAML), else the default. All
// violations (unknown flags, bad values, validate()) are reported together in one UsageError: one
// line each, followed by "hint: " lines.
//
// Command line: `--flag value` or `--flag=value`. A list takes values up to the next token that
// starts with "--" (a number may be negative); lists of numbers may also be written 1,2,3. A bool
// is a switch and may be followed by true or false; --no-x means the opposite of --x. An optional
// number may be `none`. If a flag is given more than once, the last one counts, and a note says so.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

// Data that the owner of a table attaches to a known flag; parsing only passes it on.
struct FlagClaim;

// A flag that no field owns (the rest of Megatron's flags; see
// training/arguments/flag_table.h).
struct KnownFlag {
  enum class Kind { kAlreadySo, kRefused };
  std::string_view flag;  // spellings separated by one space: "--transformer-impl"
  Kind kind;
  std::string_view reason;  // why it is accepted, or why it is refused
  int min_values = 0;       // minimal number of values
  int max_values = 0;       // -1: any number
  // Values, separated by one space: those with which a refused flag has no effect ("0 none"), or
  // the legal ones of an accepted flag (empty: any).
  std::string_view neutral = {};
  const FlagClaim* claim = nullptr;  // the owner's, for ParseOptions::judge
};

// Values that our flag does not support, but other programs' flag of that name does; also of a
// known flag, of whose values one is such.
struct RefusedValue {
  std::string_view flag;
  std::string_view values;  // separated by one space: "fp16 fp8"
  std::string_view reason;
};

// Whether a known flag is accepted with this configuration.
struct FlagVerdict {
  bool accepted = false;
  std::string reason;
};

struct ParseOptions {
  // Flags that are accepted because they describe what is done anyway, or refused with a reason
  std::span<const KnownFlag> known = {};
  std::span<const RefusedValue> refused_values = {};  // refused with the reason
  bool allow_config_file = true;                      // --config FILE
  // Called after parsing and before validation: derives defaults from other values. Also called if
  // there are violations already; an Error that it throws is then dropped, else reported as one
  // more violation.
  std::function<void()> finalize = {};
  // Called after finalize() for each known flag that was given: acceptance may depend on other
  // values. If not set: the kind and the reason of the flag decide.
  std::function<FlagVerdict(const KnownFlag&)> judge = {};
  // Called after each config's own validate(): rules across configs.
  std::function<void(Violations&)> validate = {};
  bool print_notes = true;  // notes go to the log; false: only returned to the caller
  // Name of a string or string list field that takes positional arguments (`megatron report
  // RUN_DIR`).
  std::string_view positional = {};
};

struct ParseResult {
  std::vector<std::string> given;  // names of the fields given on the command line or in the file
  std::vector<std::pair<std::string, std::string>> already_so;  // flag, reason
  std::vector<std::string> notes;  // remarks on the command line: repeated flags
  bool help = false;               // --help was given; nothing was validated
  std::string help_topic;          // the words after --help
  bool was_given(std::string_view name) const;
};

// Parses argv[1..] into the configs. Throws UsageError with all violations; the configs are then
// partly set.
ParseResult parse_flags(std::span<Config* const> configs, int argc, const char* const* argv,
                        const ParseOptions& options = {});

// Reads "name: value" pairs of a YAML file (as written by to_yaml or to_json) into the configs,
// without validation. Throws UsageError with every unknown key (unless ignored) and every value
// that cannot be parsed.
void read_yaml(std::span<Config* const> configs, const std::string& path,
               bool ignore_unknown = false);

std::string help_text(std::string_view usage, std::span<Config* const> configs);
// parse_flags() of a command with few flags; with --help prints them all, and returns nothing.
std::optional<ParseResult> parse_or_help(std::string_view usage, std::span<Config* const> configs,
                                         int argc, const char* const* argv,
                                         const ParseOptions& options = {});

// The help of commands with many flags. `topic` (the words after --help): empty: the flags whose
// fields are in `basics`, and the names of all groups; "all": all flags; else the groups with that
// name, or the flags whose names contain it.
std::string help_text(std::string_view usage, std::span<Config* const> configs,
                      std::string_view topic, std::span<const std::string_view> basics);
std::string to_yaml(std::span<Config* const> configs);
std::string to_json(std::span<Config* const> configs);  // one object, fields in order
// Every command line spelling that sets a field of the configs.
std::vector<std::string> accepted_flags(std::span<Config* const> configs);

// The nearest of `names` to `word` by edit distance, or "" if none is close.
std::string nearest(std::string_view word, std::span<const std::string> names);

}  // namespace megatron
