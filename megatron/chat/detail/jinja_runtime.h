// Renders a parsed template.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/chat/detail/jinja_parser.h"

namespace megatron {

struct JinjaArguments {
  std::vector<JinjaValue> positional;
  std::vector<std::pair<std::string, JinjaValue>> named;

  // The argument at `index`, or of that name; null if it is not given. check_all_used() refuses
  // arguments that were never requested.
  const JinjaValue* find(size_t index, std::string_view name);
  JinjaValue get(size_t index, std::string_view name, JinjaValue otherwise);
  void check_all_used(size_t most_positional) const;

 private:
  std::vector<std::string> asked_;
};

struct JinjaCallable {
  std::function<JinjaValue(JinjaArguments&)> call;
};

JinjaValue jinja_function(std::function<JinjaValue(JinjaArguments&)> call);

// The built-in filters and tests. Throw JinjaError.
JinjaValue apply_jinja_filter(const std::string& name, const JinjaValue& value,
                              JinjaArguments& arguments);
bool apply_jinja_test(const std::string& name, const JinjaValue& value, JinjaArguments& arguments);

// value.name: a method, else the entry of a dict, else Undefined. value[key]: in the reverse order.
JinjaValue jinja_attribute(const JinjaValue& value, const std::string& name);
JinjaValue jinja_item(const JinjaValue& value, const JinjaValue& key);
bool jinja_contains(const JinjaValue& all, const JinjaValue& item);
// The elements that {% for %} iterates over.
std::vector<JinjaValue> jinja_elements(const JinjaValue& value);
// a + b and so on, by Python's rules.
JinjaValue jinja_binary(const std::string& op, const JinjaValue& a, const JinjaValue& b);

// An error at a position of the source.
struct JinjaRuntimeError {
  size_t offset;
  std::string construct;  // "the filter tojson"
  std::string message;
};

struct JinjaOutput {
  std::string text;
  // [begin, end) bytes of the text inside {% generation %}, ascending.
  std::vector<std::pair<size_t, size_t>> generated;
};

// Renders with the given variables. Throws JinjaRuntimeError, also if the template runs for too
// long or produces more than `most_bytes` (see JinjaBudget).
JinjaOutput render_jinja(const JinjaBody& body,
                         std::vector<std::pair<std::string, JinjaValue>> variables,
                         uint64_t most_bytes);

}  // namespace megatron
