// Values of chat templates with Python's semantics: truth, equality, order, text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace megatron {

class JinjaValue;
struct JinjaCallable;

struct JinjaNone {};
// The value of a missing name, key or attribute. `what` is the message: "'tools' is undefined".
struct JinjaUndefined {
  std::string what;
};
struct JinjaSequence {
  std::vector<JinjaValue> items;
  bool is_tuple = false;
  int depth = 1;  // nesting depth of lists and dicts
};
// Keys in insertion order.
struct JinjaMapping {
  std::vector<std::pair<JinjaValue, JinjaValue>> entries;
  bool is_namespace = false;  // made by namespace(): the only mutable value
  int depth = 1;              // as above; updated by set()
  const JinjaValue* find(const JinjaValue& key) const;
  const JinjaValue* find(std::string_view key) const;
  void set(const JinjaValue& key, JinjaValue value);
};

// The budget of one rendering: the bytes of all strings and lists that its operations build,
// counted together and never returned, so that memory and time are both bounded. While an object
// lives it is its thread's budget; without one nothing is counted.
class JinjaBudget {
 public:
  explicit JinjaBudget(uint64_t bytes);
  ~JinjaBudget();
  JinjaBudget(const JinjaBudget&) = delete;
  JinjaBudget& operator=(const JinjaBudget&) = delete;

 private:
  friend void jinja_charge(uint64_t bytes);
  friend void jinja_check_room(uint64_t bytes);
  void check(uint64_t used) const;
  const uint64_t most_;
  uint64_t used_ = 0;
  JinjaBudget* const outer_;
};
// Counts bytes to be allocated, or work that takes about as long. Throws JinjaError if the budget
// is exceeded. Called before allocating.
void jinja_charge(uint64_t bytes);
// Throws JinjaError if that many more bytes would exceed the budget; counts nothing.
void jinja_check_room(uint64_t bytes);

// Copies share strings and lists.
class JinjaValue {
 public:
  JinjaValue() : data_(JinjaUndefined{}) {}
  JinjaValue(JinjaNone value) : data_(value) {}
  JinjaValue(JinjaUndefined value) : data_(std::move(value)) {}
  JinjaValue(bool value) : data_(value) {}
  JinjaValue(int64_t value) : data_(value) {}
  JinjaValue(double value) : data_(value) {}
  JinjaValue(std::string value);
  JinjaValue(std::shared_ptr<JinjaSequence> value) : data_(std::move(value)) {}
  JinjaValue(std::shared_ptr<JinjaMapping> value) : data_(std::move(value)) {}
  JinjaValue(std::shared_ptr<const JinjaCallable> value) : data_(std::move(value)) {}
  static JinjaValue text(std::string_view value) { return JinjaValue(std::string(value)); }
  static JinjaValue list(std::vector<JinjaValue> items);
  static JinjaValue tuple(std::vector<JinjaValue> items);

  bool is_undefined() const { return std::holds_alternative<JinjaUndefined>(data_); }
  bool is_none() const { return std::holds_alternative<JinjaNone>(data_); }
  bool is_bool() const { return std::holds_alternative<bool>(data_); }
  bool is_integer() const { return std::holds_alternative<int64_t>(data_); }
  bool is_float() const { return std::holds_alternative<double>(data_); }
  bool is_number() const { return is_bool() || is_integer() || is_float(); }
  bool is_string() const { return std::holds_alternative<Text>(data_); }
  bool is_sequence() const { return std::holds_alternative<std::shared_ptr<JinjaSequence>>(data_); }
  bool is_mapping() const { return std::holds_alternative<std::shared_ptr<JinjaMapping>>(data_); }
  bool is_callable() const {
    return std::holds_alternative<std::shared_ptr<const JinjaCallable>>(data_);
  }

  const std::string& undefined_reason() const { return std::get<JinjaUndefined>(data_).what; }
  const std::string& string() const { return *std::get<Text>(data_); }
  const std::vector<JinjaValue>& items() const { return sequence()->items; }
  const std::shared_ptr<JinjaSequence>& sequence() const {
    return std::get<std::shared_ptr<JinjaSequence>>(data_);
  }
  const std::shared_ptr<JinjaMapping>& mapping() const {
    return std::get<std::shared_ptr<JinjaMapping>>(data_);
  }
  const JinjaCallable& callable() const {
    return *std::get<std::shared_ptr<const JinjaCallable>>(data_);
  }
  // Of a bool, an integer or a float.
  int64_t integer() const;
  double number() const;

  bool truth() const;
  // "str", "list", "dict": Python's name of its type.
  const char* type_name() const;

  // Nesting depth of lists and dicts; 0 for other values.
  int depth() const;

 private:
  using Text = std::shared_ptr<const std::string>;
  std::variant<JinjaUndefined, JinjaNone, bool, int64_t, double, Text,
               std::shared_ptr<JinjaSequence>, std::shared_ptr<JinjaMapping>,
               std::shared_ptr<const JinjaCallable>>
      data_;
};

bool equal(const JinjaValue& a, const JinjaValue& b);
// Whether a < b. Throws JinjaError if Python defines no order.
bool less(const JinjaValue& a, const JinjaValue& b);

// Python's str() and repr(). Undefined is "".
std::string jinja_text(const JinjaValue& value);
std::string jinja_repr(const JinjaValue& value);

// Python's json.dumps. `indent` below 0: on one line. Throws JinjaError for values without a JSON
// form.
struct JinjaJsonStyle {
  int64_t indent = -1;
  bool sort_keys = false;
  bool ensure_ascii = false;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string jinja_json(const JinjaValue& value, const JinjaJsonStyle& style);

// Throws JinjaError for text that is not JSON.
JinjaValue jinja_from_json(std::string_view text);

// A message about values; the evaluator adds the position in the template.
struct JinjaError {
  std::string message;
};
[[noreturn]] void jinja_error(std::string message);

// The characters of a text.
std::vector<std::string> python_characters(std::string_view text);

}  // namespace megatron
