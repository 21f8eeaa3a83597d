#include "megatron/chat/detail/jinja_value.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

constexpr int kDeepestWritten = 200;  // nesting of values that are written
constexpr int kDeepestBuilt = 500;    // and of those that a template builds

thread_local JinjaBudget* budget = nullptr;

// The shortest text that reads back as the same number, as Python writes it.
std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char digits[64];
  const auto plain =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific);
  std::string text(digits, plain.ptr);
  const size_t e = text.find('e');
  const int exponent = std::atoi(text.c_str() + e + 1);
  if (exponent < -4 || exponent >= 16) return text;  // 1e+16, 1.5e-05
  char fixed[64];
  const auto end = std::to_chars(fixed, fixed + sizeof fixed, value, std::chars_format::fixed);
  std::string out(fixed, end.ptr);
  if (out.find('.') == std::string::npos) out += ".0";
  return out;
}

std::string string_repr(const std::string& text) {
  const bool single = text.find('\'') == std::string::npos || text.find('"') != std::string::npos;
  const char quote = single ? '\'' : '"';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    const Utf8Character c = decode_utf8(text, i);
    const std::string_view bytes = std::string_view(text).substr(i, static_cast<size_t>(c.bytes));
    i += static_cast<size_t>(c.bytes);
    char escaped[16];
    if (c.code == static_cast<uint32_t>(quote) || c.code == '\\') {
      out += '\\';
      out += bytes;
    } else if (c.code == '\n' || c.code == '\r' || c.code == '\t') {
      out += c.code == '\n' ? "\\n" : c.code == '\r' ? "\\r" : "\\t";
    } else if (c.code < 0x20 || c.code == 0x7f || (c.code >= 0x80 && c.code < 0xa1) ||
               c.code == 0xad) {
      std::snprintf(escaped, sizeof escaped, "\\x%02x", c.code);
      out += escaped;
    } else if (const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c.code));
               c.code >= 0x80 &&
               (category == UTF8PROC_CATEGORY_CN || category >= UTF8PROC_CATEGORY_ZS)) {
      std::snprintf(escaped, sizeof escaped,
                    c.code < 0x100     ? "\\x%02x"
                    : c.code < 0x10000 ? "\\u%04x"
                                       : "\\U%08x",
                    c.code);
      out += escaped;
    } else {
      out += bytes;
    }
  }
  return out + quote;
}

void append_json_string(std::string_view text, bool ensure_ascii, std::string& out) {
  out += '"';
  char escaped[16];
  for (size_t i = 0; i < text.size();) {
    const Utf8Character c = decode_utf8(text, i);
    const std::string_view bytes = text.substr(i, static_cast<size_t>(c.bytes));
    i += static_cast<size_t>(c.bytes);
    switch (c.code) {
      case '"':
        out += "\\\"";
        continue;
      case '\\':
        out += "\\\\";
        continue;
      case '\n':
        out += "\\n";
        continue;
      case '\r':
        out += "\\r";
        continue;
      case '\t':
        out += "\\t";
        continue;
      case '\b':
        out += "\\b";
        continue;
      case '\f':
        out += "\\f";
        continue;
      default:
        break;
    }
    if (c.code < 0x20 || (ensure_ascii && c.code > 0x7e && c.code < 0x10000)) {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c.code);
      out += escaped;
    } else if (ensure_ascii && c.code >= 0x10000) {
      const uint32_t high = 0xd800 + ((c.code - 0x10000) >> 10),
                     low = 0xdc00 + ((c.code - 0x10000) & 0x3ff);
      std::snprintf(escaped, sizeof escaped, "\\u%04x\\u%04x", high, low);
      out += escaped;
    } else {
      out += bytes;
    }
  }
  out += '"';
}

class JsonText {
 public:
  explicit JsonText(const JinjaJsonStyle& style) : style_(style) {}
  void add(const JinjaValue& value, int depth) {
    if (depth > kDeepestWritten) jinja_error("values are nested too deeply for JSON");
    jinja_check_room(out_.size());
    if (value.is_none()) {
      out_ += "null";
    } else if (value.is_bool()) {
      out_ += value.truth() ? "true" : "false";
    } else if (value.is_integer()) {
      out_ += std::to_string(value.integer());
    } else if (value.is_float()) {
      const std::string text = float_text(value.number());
      out_ += text == "nan"    ? "NaN"
              : text == "inf"  ? "Infinity"
              : text == "-inf" ? "-Infinity"
                               : text;
    } else if (value.is_string()) {
      append_json_string(value.string(), style_.ensure_ascii, out_);
    } else if (value.is_sequence()) {
      add_list(value.items(), depth);
    } else if (value.is_mapping() && !value.mapping()->is_namespace) {
      add_mapping(*value.mapping(), depth);
    } else {
      jinja_error(cat("an object of type ", value.type_name(), " has no form in JSON"));
    }
  }
  std::string take() { return std::move(out_); }

 private:
  void line(int depth) {
    if (style_.indent < 0) return;
    out_ += '\n';
    out_.append(static_cast<size_t>(style_.indent * depth), ' ');
  }
  // With indentation Python ends lines with ",", unless separators are given.
  std::string_view item_separator() const {
    return style_.indent >= 0 && style_.item_separator == ", " ? std::string_view(",")
                                                               : style_.item_separator;
  }
  void add_list(const std::vector<JinjaValue>& items, int depth) {
    if (items.empty()) {
      out_ += "[]";
      return;
    }
    out_ += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += item_separator();
      line(depth + 1);
      add(items[i], depth + 1);
    }
    line(depth);
    out_ += ']';
  }
  void add_mapping(const JinjaMapping& mapping, int depth) {
    if (mapping.entries.empty()) {
      out_ += "{}";
      return;
    }
    std::vector<const std::pair<JinjaValue, JinjaValue>*> order;
    for (const auto& entry : mapping.entries) order.push_back(&entry);
    if (style_.sort_keys)
      std::stable_sort(order.begin(), order.end(),
                       [](const auto* a, const auto* b) { return less(a->first, b->first); });
    out_ += '{';
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0) out_ += item_separator();
      line(depth + 1);
      const JinjaValue& key = order[i]->first;
      if (key.is_string()) {
        append_json_string(key.string(), style_.ensure_ascii, out_);
      } else {
        out_ += '"';
        add(key, kDeepestWritten);
        out_ += '"';
      }
      out_ += style_.key_separator;
      add(order[i]->second, depth + 1);
    }
    line(depth);
    out_ += '}';
  }

  const JinjaJsonStyle& style_;
  std::string out_;
};

JinjaValue convert(const nlohmann::ordered_json& json, int depth) {
  if (depth > kDeepestWritten) jinja_error("is nested too deeply");
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::boolean:
      return json.get<bool>();
    case nlohmann::ordered_json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return json.get<double>();
      [[fallthrough]];
    case nlohmann::ordered_json::value_t::number_integer:
      return json.get<int64_t>();
    case nlohmann::ordered_json::value_t::number_float:
      return json.get<double>();
    case nlohmann::ordered_json::value_t::string:
      return json.get<std::string>();
    case nlohmann::ordered_json::value_t::array: {
      std::vector<JinjaValue> items;
      for (const auto& item : json) items.push_back(convert(item, depth + 1));
      return JinjaValue::list(std::move(items));
    }
    case nlohmann::ordered_json::value_t::object: {
      auto mapping = std::make_shared<JinjaMapping>();
      for (const auto& [key, value] : json.items())
        mapping->set(JinjaValue::text(key), convert(value, depth + 1));
      return mapping;
    }
    default:
      return JinjaNone{};
  }
}

int deeper(int depth, const JinjaValue& value) {
  depth = std::max(depth, 1 + value.depth());
  if (depth > kDeepestBuilt) jinja_error("lists and dicts are nested too deeply in each other");
  return depth;
}

JinjaValue sequence_of(std::vector<JinjaValue> items, bool is_tuple) {
  jinja_charge(items.size() * sizeof(JinjaValue));
  int depth = 1;
  for (const JinjaValue& item : items) depth = deeper(depth, item);
  return std::make_shared<JinjaSequence>(JinjaSequence{std::move(items), is_tuple, depth});
}

std::string repr_of(const JinjaValue& value, int depth) {
  if (depth > kDeepestWritten) jinja_error("values are nested too deeply to be written");
  if (value.is_string()) return string_repr(value.string());
  if (value.is_undefined()) return "Undefined";
  if (value.is_sequence()) {
    const bool tuple = value.sequence()->is_tuple;
    std::string out = tuple ? "(" : "[";
    for (size_t i = 0; i < value.items().size(); ++i) {
      if (i > 0) out += ", ";
      out += repr_of(value.items()[i], depth + 1);
      jinja_check_room(out.size());
    }
    if (tuple && value.items().size() == 1) out += ",";
    return out + (tuple ? ")" : "]");
  }
  if (value.is_mapping()) {
    std::string out = value.mapping()->is_namespace ? "<Namespace {" : "{";
    bool first = true;
    for (const auto& [key, entry] : value.mapping()->entries) {
      if (!first) out += ", ";
      first = false;
      out += repr_of(key, depth + 1) + ": " + repr_of(entry, depth + 1);
      jinja_check_room(out.size());
    }
    return out + (value.mapping()->is_namespace ? "}>" : "}");
  }
  if (value.is_callable()) return "<function>";
  return jinja_text(value);
}

}  // namespace

void jinja_error(std::string message) { throw JinjaError{std::move(message)}; }

JinjaBudget::JinjaBudget(uint64_t bytes) : most_(bytes), outer_(budget) { budget = this; }
JinjaBudget::~JinjaBudget() { budget = outer_; }

void JinjaBudget::check(uint64_t used) const {
  if (used > most_)
    jinja_error(cat("the template makes more than ", most_,
                    " bytes of text and lists, which is the limit for this conversation"));
}

void jinja_charge(uint64_t bytes) {
  if (budget == nullptr) return;
  budget->used_ += bytes;
  budget->check(budget->used_);
}

void jinja_check_room(uint64_t bytes) {
  if (budget != nullptr) budget->check(budget->used_ + bytes);
}

JinjaValue::JinjaValue(std::string value) {
  constexpr uint64_t kObject = 64;  // memory of a string besides its text
  jinja_charge(value.size() + kObject);
  data_ = std::make_shared<const std::string>(std::move(value));
}

int JinjaValue::depth() const {
  return is_sequence() ? sequence()->depth : is_mapping() ? mapping()->depth : 0;
}

const JinjaValue* JinjaMapping::find(const JinjaValue& key) const {
  jinja_charge(entries.size() / 8);
  for (const auto& [own, value] : entries)
    if (equal(own, key)) return &value;
  return nullptr;
}

const JinjaValue* JinjaMapping::find(std::string_view key) const {
  for (const auto& [own, value] : entries)
    if (own.is_string() && own.string() == key) return &value;
  return nullptr;
}

void JinjaMapping::set(const JinjaValue& key, JinjaValue value) {
  jinja_charge(entries.size() / 8);
  depth = deeper(deeper(depth, key), value);
  for (auto& [own, old] : entries) {
    if (equal(own, key)) {
      old = std::move(value);
      return;
    }
  }
  entries.emplace_back(key, std::move(value));
}

JinjaValue JinjaValue::list(std::vector<JinjaValue> items) {
  return sequence_of(std::move(items), false);
}
JinjaValue JinjaValue::tuple(std::vector<JinjaValue> items) {
  return sequence_of(std::move(items), true);
}

int64_t JinjaValue::integer() const {
  if (is_bool()) return std::get<bool>(data_) ? 1 : 0;
  return std::get<int64_t>(data_);
}

double JinjaValue::number() const {
  return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
}

bool JinjaValue::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_float()) return number() != 0;
  if (is_number()) return integer() != 0;
  if (is_string()) return !string().empty();
  if (is_sequence()) return !items().empty();
  if (is_mapping()) return mapping()->is_namespace || !mapping()->entries.empty();
  return true;
}

const char* JinjaValue::type_name() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_integer()) return "int";
  if (is_float()) return "float";
  if (is_string()) return "str";
  if (is_sequence()) return sequence()->is_tuple ? "tuple" : "list";
  if (is_mapping()) return mapping()->is_namespace ? "Namespace" : "dict";
  return "function";
}

bool equal(const JinjaValue& a, const JinjaValue& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.is_string() && b.is_string()) {
    if (a.string().size() != b.string().size()) return false;
    jinja_charge(a.string().size() / 16);
    return a.string() == b.string();
  }
  if (a.is_none() || a.is_undefined()) return a.is_none() ? b.is_none() : b.is_undefined();
  if (a.is_sequence() && b.is_sequence()) {
    jinja_charge(16);  // the same list may occur very often
    return a.sequence() == b.sequence() || (a.sequence()->is_tuple == b.sequence()->is_tuple &&
                                            std::equal(a.items().begin(), a.items().end(),
                                                       b.items().begin(), b.items().end(), equal));
  }
  if (a.is_mapping() && b.is_mapping()) {
    const JinjaMapping &x = *a.mapping(), &y = *b.mapping();
    if (&x == &y) return true;
    jinja_charge(16);
    if (x.is_namespace || y.is_namespace || x.entries.size() != y.entries.size()) return false;
    return std::all_of(x.entries.begin(), x.entries.end(), [&](const auto& entry) {
      const JinjaValue* other = y.find(entry.first);
      return other != nullptr && equal(entry.second, *other);
    });
  }
  if (a.is_callable() && b.is_callable()) return &a.callable() == &b.callable();
  return false;
}

bool less(const JinjaValue& a, const JinjaValue& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() < b.number();
    return a.integer() < b.integer();
  }
  if (a.is_string() && b.is_string())
    return a.string() < b.string();  // UTF-8 keeps the order of code points
  if (a.is_sequence() && b.is_sequence() && a.sequence()->is_tuple == b.sequence()->is_tuple) {
    for (size_t i = 0; i < a.items().size() && i < b.items().size(); ++i)
      if (!equal(a.items()[i], b.items()[i])) return less(a.items()[i], b.items()[i]);
    return a.items().size() < b.items().size();
  }
  if (a.is_undefined()) jinja_error(a.undefined_reason());
  if (b.is_undefined()) jinja_error(b.undefined_reason());
  jinja_error(cat("'<' is not defined between ", a.type_name(), " and ", b.type_name()));
}

std::string jinja_text(const JinjaValue& value) {
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.truth() ? "True" : "False";
  if (value.is_integer()) return std::to_string(value.integer());
  if (value.is_float()) return float_text(value.number());
  if (value.is_string()) return value.string();
  return repr_of(value, 0);
}

std::string jinja_repr(const JinjaValue& value) { return repr_of(value, 0); }

std::string jinja_json(const JinjaValue& value, const JinjaJsonStyle& style) {
  JsonText text(style);
  text.add(value, 0);
  return text.take();
}

JinjaValue jinja_from_json(std::string_view text) {
  const nlohmann::ordered_json json =
      nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) jinja_error("is no JSON");
  return convert(json, 0);
}

std::vector<std::string> python_characters(std::string_view text) {
  jinja_check_room(sizeof(std::string) * static_cast<uint64_t>(python_length(text)));
  std::vector<std::string> out;
  for (size_t i = 0; i < text.size();) {
    const auto bytes = static_cast<size_t>(decode_utf8(text, i).bytes);
    out.emplace_back(text.substr(i, bytes));
    i += bytes;
  }
  return out;
}

}  // namespace megatron
