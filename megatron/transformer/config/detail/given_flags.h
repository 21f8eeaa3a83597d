// Which flags of a topic were given.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "megatron/base/field_info.h"

namespace megatron {

// Flags whose values differ from the defaults.
template <class Topic>
std::vector<std::string> given_flags(const Topic& topic) {
  struct Fields : Config {
    Topic values;
    void fields(FieldVisitor& visitor) override { values.fields(visitor); }
  };
  Fields given, defaults;
  given.values = topic;
  Config* const both[] = {&given, &defaults};
  const std::vector<FieldInfo> a = describe_fields(std::span(both, 1)),
                               b = describe_fields(std::span(both + 1, 1));
  std::vector<std::string> flags;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].value != b[i].value) flags.push_back(a[i].flags.front());
  return flags;
}

}  // namespace megatron
