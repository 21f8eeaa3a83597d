// Fields as data: the result of visiting fields.h, and a way to set them. Parsing and printing are
// built on this.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

enum class FieldKind {
  kBool,
  kInt,
  kDouble,
  kString,
  kOptionalInt,
  kOptionalDouble,
  kIntList,
  kDoubleList,
  kStringList,
  kChoice
};

// A choice is represented by its spelling (string), an empty optional by monostate.
using FieldValue =
    std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>,
                 std::vector<double>, std::vector<std::string>>;

struct FieldInfo {
  std::string name;                // member name, key in YAML and JSON
  std::vector<std::string> flags;  // spellings, the first is shown
  bool negative = false;           // giving a flag sets false
  FieldKind kind = FieldKind::kBool;
  std::vector<std::string> spellings;  // legal values of a choice
  std::string help;
  std::string group;
  FieldRole role = FieldRole::kRun;
  FieldValue value;  // at the time of describe_fields()

  bool is_list() const;
  bool is_optional() const;
  // The kind of value, for help and errors: "an integer", "a number", "text", ...
  std::string_view expected() const;
};

// Every field in the order of --help: the groups of a struct as they were started, each once.
// Throws InternalError if two fields share a name or a flag.
std::vector<FieldInfo> describe_fields(std::span<Config* const> configs);

// Sets the named fields. A value must hold the alternative that describe_fields() shows for its
// kind.
void assign_fields(std::span<Config* const> configs,
                   const std::map<std::string, FieldValue>& values);

// Converts texts (several for a list) into a value of the field's kind. On failure adds one
// violation that starts with `what` ("--num-layers", "run.yaml:3: num_layers") and returns nullopt.
std::optional<FieldValue> parse_value(const FieldInfo& field, std::string_view what,
                                      std::span<const std::string> texts, Violations& violations);

// The shortest decimal text that parses to the same value.
std::string format_double(double value);

// As a user writes it: no quotes, lists separated by spaces, "none" for an empty optional.
std::string format_value(const FieldValue& value);

// As to_yaml() writes it.
std::string format_yaml(const FieldValue& value);

}  // namespace megatron
