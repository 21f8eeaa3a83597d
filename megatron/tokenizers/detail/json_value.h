// Values of a JSON file with their position, for messages. Only for sources of this folder: it
// includes simdjson.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"

namespace megatron {

namespace dom = simdjson::dom;

std::string_view json_type_name(dom::element_type type);

// A value of a JSON file with its position, for messages.
struct JsonValue {
  dom::element element;
  std::string where;  // "file: key.key[3]"

  bool is_null() const { return element.is_null(); }
  template <class T>
  T as(std::string_view expected) const {
    T result;
    MEGATRON_CHECK(element.get(result) == simdjson::SUCCESS, where, " is ",
                   json_type_name(element.type()), ", expected ", expected);
    return result;
  }
  std::string str() const { return std::string(as<std::string_view>("a string")); }
  bool boolean() const { return as<bool>("a boolean"); }
  dom::object object() const { return as<dom::object>("an object"); }
  dom::array array() const { return as<dom::array>("an array"); }
  double number() const { return as<double>("a number"); }
  // An integer from 0 to `largest`.
  int64_t count(int64_t largest) const {
    const int64_t value = as<int64_t>("an integer");
    MEGATRON_CHECK(value >= 0 && value <= largest, where, " is ", value,
                   ", expected an integer from 0 to ", largest);
    return value;
  }
  // A member; nullopt if it is absent.
  std::optional<JsonValue> find(std::string_view key) const {
    dom::element found;
    if (object()[key].get(found) != simdjson::SUCCESS) return std::nullopt;
    return JsonValue{found, cat(where, where.ends_with(": ") ? "" : ".", key)};
  }
  // A member that is neither absent nor null.
  std::optional<JsonValue> find_value(std::string_view key) const {
    std::optional<JsonValue> found = find(key);
    if (found && found->is_null()) return std::nullopt;
    return found;
  }
  JsonValue at(std::string_view key) const {
    std::optional<JsonValue> found = find(key);
    MEGATRON_CHECK(found.has_value(), where, where.ends_with(": ") ? "" : " ", "has no \"", key,
                   "\"");
    return *found;
  }
  std::vector<JsonValue> elements() const {
    std::vector<JsonValue> values;
    for (const dom::element item : array())
      values.push_back({item, cat(where, "[", values.size(), "]")});
    return values;
  }
  bool boolean_or(std::string_view key, bool otherwise) const {
    const std::optional<JsonValue> found = find_value(key);
    return found ? found->boolean() : otherwise;
  }
  // The member "type", which names a component.
  std::string type() const { return at("type").str(); }
};

// The root of a file, or of a text, which must be an object. `parser` owns what it refers to.
// `name`: of the text, for messages.
JsonValue parse_json_object(dom::parser& parser, const std::filesystem::path& path);
JsonValue parse_json_object(dom::parser& parser, std::string_view text, const std::string& name);

}  // namespace megatron
