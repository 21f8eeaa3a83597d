// Reads the members of a request's JSON object, and remembers which nobody asked for.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/serving/api_error.h"

namespace megatron {

using JsonElement = simdjson::dom::element;

// One object. Members that are null count as absent. Throws ApiError 400 that names a member of
// another type than asked for, or given twice.
class JsonObject {
 public:
  // `prefix`: of its members' names in errors ("stream_options.").
  JsonObject(simdjson::dom::object object, std::string prefix);

  bool has(std::string_view name);
  std::optional<JsonElement> any(std::string_view name);
  std::optional<bool> boolean(std::string_view name);
  std::optional<int64_t> integer(std::string_view name);  // 3.0 is one, too
  std::optional<double> number(std::string_view name);
  std::optional<std::string> text(std::string_view name);
  std::optional<simdjson::dom::array> array(std::string_view name);
  std::optional<JsonObject> object(std::string_view name);
  // The same within bounds, which both belong to it.
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);

  std::string path(std::string_view name) const { return prefix_ + std::string(name); }
  // Names that were not asked for, and are not null, in their order.
  std::vector<std::string> unknown() const;

 private:
  std::vector<std::pair<std::string_view, JsonElement>> members_;
  std::set<std::string, std::less<>> asked_;
  std::string prefix_;
};

// The parser's memory and the document.
class JsonDocument {
 public:
  // Throws ApiError 400: no JSON, nested deeper than `max_depth`, or no object.
  JsonDocument(std::string_view text, size_t max_depth);
  JsonObject root() const;

 private:
  simdjson::dom::parser parser_;
  simdjson::dom::object object_;
};

// "a text", "a number", ...
std::string_view kind_of(JsonElement element);
// An integer, also as 3.0; null: no such.
std::optional<int64_t> as_integer(JsonElement element);
// The value as JSON text, without blanks.
std::string json_text(JsonElement element);

}  // namespace megatron
