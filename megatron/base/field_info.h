// Fields as data: what the visitors of fields.h saw, and a way to set them. Parsing and printing
// are written on this.
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

// A choice travels as its spelling (string); an empty optional as monostate.
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
  FieldValue value;  // when it was described

  bool is_list() const;
  bool is_optional() const;
  // What stands for a value in help and errors: "an integer", "a number", "text", ...
  std::string_view expected() const;
};

// Every field in order. Throws InternalError when two fields share a name or a flag.
std::vector<FieldInfo> describe_fields(std::span<Config* const> configs);

// Sets the named fields. A value must hold the alternative that describe_fields() shows for its
// kind.
void assign_fields(std::span<Config* const> configs,
                   const std::map<std::string, FieldValue>& values);

// Converts texts (several for a list) into a value of the field's kind. Otherwise adds one
// violation that starts with `what` ("--num-layers", "run.yaml:3: num_layers") and returns nothing.
std::optional<FieldValue> parse_value(const FieldInfo& field, std::string_view what,
                                      std::span<const std::string> texts, Violations& violations);

// The shortest decimal text that reads back as the same value.
std::string format_double(double value);

// As a person writes it: no quotes, lists separated by blanks, "none" for an empty optional.
std::string format_value(const FieldValue& value);

}  // namespace megatron
