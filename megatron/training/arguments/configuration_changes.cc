#include "megatron/training/arguments/configuration_changes.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/parse.h"

namespace megatron {

namespace {

// Flags that say where a run starts from always differ.
constexpr std::array<std::string_view, 3> kStart = {"load", "start", "ckpt_step"};

std::string shown(const FieldInfo& field) {
  const std::string value = format_value(field.value);
  return value.empty() ? "not given" : value;
}

}  // namespace

std::vector<std::string> configuration_changes(const Arguments& arguments,
                                               const std::filesystem::path& stored) {
  std::vector<std::string> changes;
  if (!std::filesystem::exists(stored)) return changes;
  Arguments before, now = arguments;
  read_yaml(before.configs(), stored.string(), /*ignore_unknown=*/true);
  std::map<std::string, std::string> old_values;
  for (const FieldInfo& field : describe_fields(before.configs()))
    old_values[field.name] = shown(field);
  for (const FieldInfo& field : describe_fields(now.configs())) {
    const std::string value = shown(field);
    if (std::find(kStart.begin(), kStart.end(), field.name) != kStart.end() ||
        value == old_values[field.name])
      continue;
    changes.push_back(cat(field.negative ? field.name : field.flags[0], " ", value, ", was ",
                          old_values[field.name]));
  }
  return changes;
}

}  // namespace megatron
