// Writes JSON piece by piece, for the --json output of commands and for files of results.
//
//   JsonWriter json;
//   json.begin_object().member("step", 3).key("losses");
//   json.begin_array().value(1.5).end_array().end_object();
//   print_line(json.text());
#pragma once

#include <concepts>
#include <ranges>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// `text` as a JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD; invisible
// characters and those that YAML or JavaScript treat as line ends are escaped, so that the result
// is also a YAML double-quoted scalar.
std::string json_quote(std::string_view text);

// Misuse (a key outside an object, an unfinished document) throws InternalError. Not thread safe.
class JsonWriter {
 public:
  explicit JsonWriter(int indent = 0) : indent_(indent) {}  // 0: everything on one line

  JsonWriter& begin_object();
  JsonWriter& end_object();
  JsonWriter& begin_array();
  JsonWriter& end_array();
  JsonWriter& key(std::string_view name);
  JsonWriter& null();
  JsonWriter& value(bool v);
  JsonWriter& value(double v);  // shortest exact form; null if not finite
  JsonWriter& value(std::string_view v);
  JsonWriter& value(const char* v) { return value(std::string_view(v)); }
  template <std::integral T>
    requires(!std::same_as<T, bool> && !std::same_as<T, char>)
  JsonWriter& value(T v) {
    return raw(std::to_string(v));
  }
  // An array.
  template <std::ranges::range Items>
    requires(!std::convertible_to<Items, std::string_view>)
  JsonWriter& value(const Items& items) {
    begin_array();
    for (const auto& item : items) value(item);
    return end_array();
  }
  // key(name).value(v)
  template <class T>
  JsonWriter& member(std::string_view name, const T& v) {
    key(name);
    return value(v);
  }
  // A value that already is JSON text.
  JsonWriter& raw(std::string_view json);

  // The finished document.
  const std::string& text() const;

 private:
  enum class Scope : char { kArray, kObject };
  void before_value();
  void new_line();
  JsonWriter& open(Scope scope, char bracket);
  JsonWriter& close(Scope scope, char bracket);

  int indent_;
  std::string text_;
  std::vector<Scope> scopes_;
  bool first_ = true;       // nothing written yet in the innermost scope
  bool after_key_ = false;  // a value must follow
};

}  // namespace megatron
