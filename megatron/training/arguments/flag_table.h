// Every flag of Megatron-LM that no configuration field owns: accepted because the run does it
// anyway, or refused with the reason. A field takes precedence over a row of its flag, so that a
// flag that is built needs no change here. docs/flags.md is generated from fields and table.
#pragma once

#include <span>
#include <string_view>

#include "megatron/base/parse.h"

namespace megatron {

struct Arguments;

// Why a flag has no effect because the run does what it asks for anyway, in which runs that holds,
// and what proves it. In other runs the flag is refused.
struct FlagClaim {
  std::string_view says;
  // Checked by tests/unit/flags, so that a claim that becomes false fails a test:
  //   "test Suite.Name"   this test exists
  //   "field name"        this field of the configuration exists
  //   "refused --flag"    this flag, which the claim's flag switches off, is refused; "refused":
  //                       the flag without its "no-"
  //   "absent text"       the sources do not contain it
  //   "source PATH: text" this file contains it
  //   "lacks PATH: text"  this file does not contain it
  std::string_view shown_by;
  bool (*holds)(const Arguments&) = nullptr;  // null: in every run
  std::string_view when = {};                 // `holds` in words: "without --fast"
  std::string_view otherwise = {};            // why the flag is refused where it does not hold
};

std::span<const KnownFlag> flag_table();

// Whether this flag is accepted in a run with these finalized arguments.
FlagVerdict judge_flag(const KnownFlag& flag, const Arguments& arguments);

// Makes parse_flags() use the table; its flags are judged by `arguments`, after parsing and
// `options.finalize`.
void use_flag_table(ParseOptions& options, const Arguments& arguments);

}  // namespace megatron
