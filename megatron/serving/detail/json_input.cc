#include "megatron/serving/detail/json_input.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "megatron/serving/detail/json_fault.h"

namespace megatron {
namespace {

namespace dom = simdjson::dom;

[[noreturn]] void wrong_kind(const std::string& member, std::string_view expected,
                             JsonElement found) {
  throw ApiError(400, member, cat(member, " is ", kind_of(found), "; expected ", expected));
}

}  // namespace

std::string_view kind_of(JsonElement element) {
  switch (element.type()) {
    case dom::element_type::ARRAY:
      return "a list";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::STRING:
      return "a text";
    case dom::element_type::BOOL:
      return "true or false";
    case dom::element_type::NULL_VALUE:
      return "null";
    default:
      return "a number";
  }
}

std::optional<int64_t> as_integer(JsonElement element) {
  int64_t value = 0;
  double number = 0.0;
  if (element.get(value) == simdjson::SUCCESS) return value;
  if (element.is_double() && element.get(number) == simdjson::SUCCESS &&
      number == std::floor(number) && std::abs(number) < 9.0e15)
    return static_cast<int64_t>(number);
  return std::nullopt;
}

std::string json_text(JsonElement element) {
  std::ostringstream out;
  out << simdjson::minify(element);
  return out.str();
}

JsonObject::JsonObject(dom::object object, std::string prefix) : prefix_(std::move(prefix)) {
  std::set<std::string_view> names;
  for (const auto [name, value] : object) {
    if (!names.insert(name).second)
      throw ApiError(400, path(name.substr(0, 64)),
                     cat(path(name.substr(0, 64)), " is given twice"));
    members_.emplace_back(name, value);
  }
}

std::optional<JsonElement> JsonObject::any(std::string_view name) {
  asked_.emplace(name);
  for (const auto& [member, value] : members_)
    if (member == name && !value.is_null()) return value;
  return std::nullopt;
}

bool JsonObject::has(std::string_view name) { return any(name).has_value(); }

std::optional<bool> JsonObject::boolean(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  bool value = false;
  if (found->get(value) != simdjson::SUCCESS) wrong_kind(path(name), "true or false", *found);
  return value;
}

std::optional<int64_t> JsonObject::integer(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  const auto value = as_integer(*found);
  if (!value) {
    if (found->is_number())
      throw ApiError(
          400, path(name),
          cat(path(name), " is ", json_text(*found), "; expected an integer of 64 bits"));
    wrong_kind(path(name), "an integer", *found);
  }
  return value;
}

std::optional<int64_t> JsonObject::integer(std::string_view name, int64_t low, int64_t high) {
  const auto value = integer(name);
  if (value && (*value < low || *value > high))
    throw ApiError(400, path(name),
                   cat(path(name), " ", *value, " is outside [", low, ", ", high, "]"));
  return value;
}

std::optional<double> JsonObject::number(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  double value = 0.0;
  if (!found->is_number() || found->get(value) != simdjson::SUCCESS)
    wrong_kind(path(name), "a number", *found);
  return value;
}

std::optional<std::string> JsonObject::text(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  std::string_view value;
  if (found->get(value) != simdjson::SUCCESS) wrong_kind(path(name), "a text", *found);
  return std::string(value);
}

std::optional<dom::array> JsonObject::array(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  dom::array value;
  if (found->get(value) != simdjson::SUCCESS) wrong_kind(path(name), "a list", *found);
  return value;
}

std::optional<JsonObject> JsonObject::object(std::string_view name) {
  const auto found = any(name);
  if (!found) return std::nullopt;
  dom::object value;
  if (found->get(value) != simdjson::SUCCESS) wrong_kind(path(name), "an object", *found);
  return JsonObject(value, path(name) + ".");
}

std::vector<std::string> JsonObject::unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : members_)
    if (!value.is_null() && !asked_.contains(name)) names.push_back(path(name));
  return names;
}

JsonDocument::JsonDocument(std::string_view text, size_t max_depth) {
  simdjson::error_code error = parser_.allocate(std::max<size_t>(text.size(), 1), max_depth);
  dom::element root;
  if (!error) error = parser_.parse(text.data(), text.size(), true).get(root);
  // The parser counts the document itself as a level in some versions: the limit is this one's.
  if (error) {
    const auto fault = find_json_fault(text, max_depth - 1);
    if (fault)
      throw ApiError(
          400, fault->path,
          cat("the body is no JSON that is taken: ", fault->path.empty() ? "" : fault->path + ": ",
              fault->what, ", at byte ", fault->offset));
    throw ApiError(400, "", cat("the body is no JSON: ", simdjson::error_message(error)));
  }
  if (root.get(object_) != simdjson::SUCCESS)
    throw ApiError(400, "", cat("the body is ", kind_of(root), "; expected an object"));
}

JsonObject JsonDocument::root() const { return JsonObject(object_, ""); }

}  // namespace megatron
