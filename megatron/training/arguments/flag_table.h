// Every option of Megatron-LM, and what it means here when no field of a configuration owns it:
// already so, or refused with the reason, for the run at hand. docs/flags.md is printed from it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "megatron/base/parse.h"

namespace megatron {

struct Arguments;

// Why a flag asks for what is done anyway, in which runs that is so, and what shows it. A run in
// which the claim does not hold refuses the flag.
struct FlagClaim {
  std::string_view says;
  // What tests/unit/flags looks at, so that a claim that becomes false fails:
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

// The reason of the rows whose flags are fields of a training run's configuration; it is seen where
// such a flag is given to something else. When a feature is built and its flags become fields,
// their rows get this reason.
inline constexpr std::string_view kOwnedByField = "this command has no such setting";

std::span<const KnownFlag> flag_table();

// Values of Megatron's choices that are refused where a field owns the flag.
std::span<const RefusedValue> refused_values();

// What a flag of the table means in a run with these arguments, which have been finalized.
FlagVerdict judge_flag(const KnownFlag& flag, const Arguments& arguments);

// In which runs an accepted flag is accepted, and why it is refused in others; empty: accepted in
// all.
std::string flag_condition(const KnownFlag& flag);

// Lets parse_flags() know the table and judge its flags by `arguments`, which it parses and
// `options.finalize` completes.
void use_flag_table(ParseOptions& options, const Arguments& arguments);

}  // namespace megatron
