// The filters, tests, methods and operators of chat templates, with the names and results of Jinja
// 3.1 and Python.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/detail/jinja_runtime.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

using Value = JinjaValue;
using Arguments = JinjaArguments;

void refuse_undefined(const Value& value) {
  if (value.is_undefined()) jinja_error(value.undefined_reason());
}

int64_t integer_of(const Value& value, const char* what) {
  if (!value.is_bool() && !value.is_integer())
    jinja_error(cat(what, " is of type ", value.type_name(), ", expected int"));
  return value.integer();
}

std::string string_of(const Value& value, const char* what) {
  refuse_undefined(value);
  if (!value.is_string())
    jinja_error(cat(what, " is of type ", value.type_name(), ", expected str"));
  return value.string();
}

// Charges for the time of string operations, which grows with the string even if the result is
// small.
void charge_scan(const Value& value) {
  if (value.is_string()) jinja_charge(value.string().size() / 16);
}

std::string concatenated(const std::string& a, const std::string& b) {
  jinja_check_room(a.size() + b.size());
  return a + b;
}

std::string repeated(const std::string& text, int64_t times) {
  if (text.empty() || times <= 0) return "";
  if (text.size() > (size_t{1} << 24) / static_cast<size_t>(times))
    jinja_error("the repeated text is too long");
  jinja_check_room(text.size() * static_cast<size_t>(times));
  std::string out;
  for (int64_t i = 0; i < times; ++i) out += text;
  return out;
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     int64_t most) {
  std::string out;
  size_t at = 0;
  int64_t done = 0;
  if (from.empty()) {  // between all characters
    for (const std::string& c : python_characters(text)) {
      jinja_check_room(out.size() + to.size());
      out += (most < 0 || done++ < most ? to : "") + c;
    }
    return out + (most < 0 || done < most ? to : "");
  }
  for (; most < 0 || done < most; ++done) {
    const size_t found = text.find(from, at);
    if (found == std::string::npos) break;
    jinja_check_room(out.size() + (found - at) + to.size());
    out.append(text, at, found - at).append(to);
    at = found + from.size();
  }
  return out.append(text, at, std::string::npos);
}

std::vector<Value> split_blanks(const std::string& text, int64_t most) {
  std::vector<Value> out;
  // The end of the run of blanks, or of non-blanks, that starts at `at`.
  const auto end_of_run = [&](size_t at, bool blank) {
    while (at < text.size()) {
      const Utf8Character c = decode_utf8(text, at);
      if (python_is_space(c.code) != blank) break;
      at += static_cast<size_t>(c.bytes);
    }
    return at;
  };
  for (size_t at = 0;;) {
    const size_t begin = end_of_run(at, true);
    if (begin == text.size()) return out;
    if (most >= 0 && static_cast<int64_t>(out.size()) == most) {
      out.emplace_back(text.substr(begin));
      return out;
    }
    const size_t end = end_of_run(begin, false);
    out.emplace_back(text.substr(begin, end - begin));
    at = end;
  }
}

std::vector<Value> split(const std::string& text, const std::string& by, int64_t most,
                         bool from_right) {
  if (by.empty()) jinja_error("empty separator");
  std::vector<Value> out;
  if (from_right) {
    size_t end = text.size();
    while (most < 0 || static_cast<int64_t>(out.size()) < most) {
      const size_t found = end < by.size() ? std::string::npos : text.rfind(by, end - by.size());
      if (found == std::string::npos) break;
      out.emplace_back(text.substr(found + by.size(), end - found - by.size()));
      end = found;
    }
    out.emplace_back(text.substr(0, end));
    std::reverse(out.begin(), out.end());
    return out;
  }
  size_t at = 0;
  while (most < 0 || static_cast<int64_t>(out.size()) < most) {
    const size_t found = text.find(by, at);
    if (found == std::string::npos) break;
    out.emplace_back(text.substr(at, found - at));
    at = found + by.size();
  }
  out.emplace_back(text.substr(at));
  return out;
}

// Python's str.title: words are runs of letters.
std::string python_title(const std::string& text) {
  std::string out;
  bool inside = false;
  for (const std::string& c : python_characters(text)) {
    const bool letter = python_upper_case(c) != python_lower_case(c);
    out += !letter ? c : inside ? python_lower_case(c) : python_capitalized(c);
    inside = letter;
  }
  return out;
}

// Jinja's filter: words begin after blanks, hyphens and opening brackets.
std::string filter_title(const std::string& text) {
  std::string out, word;
  const auto end_word = [&] {
    out += word.empty() ? "" : python_capitalized(word);
    word.clear();
  };
  for (const std::string& c : python_characters(text)) {
    const bool between = c == "-" || c == "(" || c == "{" || c == "[" || c == "<" ||
                         python_is_space(decode_utf8(c, 0).code);
    if (between) end_word();
    (between ? out : word) += c;
  }
  end_word();
  return out;
}

Value strip_method(const std::string& text, Arguments& a, bool left, bool right) {
  const Value* chars = a.find(0, "chars");
  a.check_all_used(1);
  if (chars == nullptr || chars->is_none()) return python_stripped(text, nullptr, left, right);
  const std::string set = string_of(*chars, "what is stripped");
  return python_stripped(text, &set, left, right);
}

bool starts_or_ends(const std::string& text, Arguments& a, bool starts) {
  const Value* given = a.find(0, "prefix");
  if (given == nullptr) jinja_error("takes a string or a tuple of strings");
  std::vector<Value> options = given->is_sequence() ? given->items() : std::vector<Value>{*given};
  a.check_all_used(1);
  return std::any_of(options.begin(), options.end(), [&](const Value& option) {
    const std::string part = string_of(option, "the argument");
    return starts ? text.starts_with(part) : text.ends_with(part);
  });
}

Value split_method(const std::string& text, Arguments& a, bool from_right) {
  const Value by = a.get(0, "sep", JinjaNone{});
  const int64_t most = integer_of(a.get(1, "maxsplit", int64_t{-1}), "maxsplit");
  a.check_all_used(2);
  if (by.is_none() && from_right && most >= 0)
    jinja_error("rsplit() at blanks with a limit is not supported");
  return Value::list(by.is_none() ? split_blanks(text, most)
                                  : split(text, string_of(by, "sep"), most, from_right));
}

std::vector<Value> lines(const std::string& text) {
  std::vector<Value> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of("\n\r", at), text.size());
    out.emplace_back(text.substr(at, end - at));
    at = end + (text.compare(end, 2, "\r\n") == 0 ? 2 : 1);
  }
  return out;
}

using StringMethod = Value (*)(const std::string&, Arguments&);

const std::map<std::string_view, StringMethod>& string_methods() {
  static const std::map<std::string_view, StringMethod> kMethods = {
      {"strip", [](const std::string& t, Arguments& a) { return strip_method(t, a, true, true); }},
      {"lstrip",
       [](const std::string& t, Arguments& a) { return strip_method(t, a, true, false); }},
      {"rstrip",
       [](const std::string& t, Arguments& a) { return strip_method(t, a, false, true); }},
      {"split", [](const std::string& t, Arguments& a) { return split_method(t, a, false); }},
      {"rsplit", [](const std::string& t, Arguments& a) { return split_method(t, a, true); }},
      {"splitlines",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value::list(lines(t));
       }},
      {"startswith",
       [](const std::string& t, Arguments& a) { return Value(starts_or_ends(t, a, true)); }},
      {"endswith",
       [](const std::string& t, Arguments& a) { return Value(starts_or_ends(t, a, false)); }},
      {"upper",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(python_upper_case(t));
       }},
      {"lower",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(python_lower_case(t));
       }},
      {"title",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(python_title(t));
       }},
      {"capitalize",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(python_capitalized(t));
       }},
      {"replace",
       [](const std::string& t, Arguments& a) {
         const std::string from = string_of(a.get(0, "old", {}), "what is replaced"),
                           to = string_of(a.get(1, "new", {}), "the new text");
         const int64_t most = integer_of(a.get(2, "count", int64_t{-1}), "count");
         a.check_all_used(3);
         return Value(replaced(t, from, to, most));
       }},
      {"removeprefix",
       [](const std::string& t, Arguments& a) {
         const std::string part = string_of(a.get(0, "prefix", {}), "the prefix");
         return Value(t.starts_with(part) ? t.substr(part.size()) : t);
       }},
      {"removesuffix",
       [](const std::string& t, Arguments& a) {
         const std::string part = string_of(a.get(0, "suffix", {}), "the suffix");
         return Value(t.ends_with(part) ? t.substr(0, t.size() - part.size()) : t);
       }},
      {"find",
       [](const std::string& t, Arguments& a) {
         const size_t found = t.find(string_of(a.get(0, "sub", {}), "what is looked for"));
         a.check_all_used(1);
         return Value(found == std::string::npos
                          ? int64_t{-1}
                          : python_length(std::string_view(t).substr(0, found)));
       }},
      {"count",
       [](const std::string& t, Arguments& a) {
         const std::string part = string_of(a.get(0, "sub", {}), "what is counted");
         a.check_all_used(1);
         int64_t count = part.empty() ? python_length(t) + 1 : 0;
         for (size_t i = t.find(part); !part.empty() && i != std::string::npos;
              i = t.find(part, i + part.size()))
           ++count;
         return Value(count);
       }},
      {"join",
       [](const std::string& t, Arguments& a) {
         std::string out;
         bool first = true;
         for (const Value& item : jinja_elements(a.get(0, "iterable", {}))) {
           if (!first) out += t;
           first = false;
           out += string_of(item, "an item that is joined");
           jinja_check_room(out.size());
         }
         a.check_all_used(1);
         return Value(std::move(out));
       }},
      {"isdigit",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(!t.empty() &&
                      std::all_of(t.begin(), t.end(), [](char c) { return c >= '0' && c <= '9'; }));
       }},
      {"isspace",
       [](const std::string& t, Arguments& a) {
         a.check_all_used(0);
         return Value(!t.empty() && python_stripped(t, nullptr, true, false).empty());
       }},
  };
  return kMethods;
}

Value dict_items(const JinjaMapping& mapping) {
  std::vector<Value> out;
  for (const auto& [key, value] : mapping.entries) out.push_back(Value::tuple({key, value}));
  return Value::list(std::move(out));
}

// The method of a dict, or null.
Value dict_method(const std::shared_ptr<JinjaMapping>& mapping, const std::string& name) {
  if (name == "items")
    return jinja_function([mapping](Arguments& a) {
      a.check_all_used(0);
      return dict_items(*mapping);
    });
  if (name == "keys" || name == "values") {
    return jinja_function([mapping, keys = name == "keys"](Arguments& a) {
      a.check_all_used(0);
      std::vector<Value> out;
      for (const auto& [key, value] : mapping->entries) out.push_back(keys ? key : value);
      return Value::list(std::move(out));
    });
  }
  if (name == "get") {
    return jinja_function([mapping](Arguments& a) {
      const Value* found = mapping->find(a.get(0, "key", {}));
      const Value otherwise = a.get(1, "default", JinjaNone{});
      a.check_all_used(2);
      return found != nullptr ? *found : otherwise;
    });
  }
  if (name == "copy")
    return jinja_function([mapping](Arguments& a) {
      a.check_all_used(0);
      return Value(std::make_shared<JinjaMapping>(*mapping));
    });
  for (const char* changing : {"update", "pop", "setdefault", "clear", "popitem"})
    if (name == changing) jinja_error(cat("a template cannot change a dict with ", name, "()"));
  return {};
}

Value list_method(const std::shared_ptr<JinjaSequence>& list, const std::string& name) {
  if (name == "index") {
    return jinja_function([list](Arguments& a) {
      const Value item = a.get(0, "value", {});
      a.check_all_used(1);
      jinja_charge(list->items.size());
      for (size_t i = 0; i < list->items.size(); ++i)
        if (equal(list->items[i], item)) return Value(static_cast<int64_t>(i));
      jinja_error("the value is not in the list");
    });
  }
  if (name == "count") {
    return jinja_function([list](Arguments& a) {
      const Value item = a.get(0, "value", {});
      a.check_all_used(1);
      jinja_charge(list->items.size());
      return Value(
          static_cast<int64_t>(std::count_if(list->items.begin(), list->items.end(),
                                             [&](const Value& own) { return equal(own, item); })));
    });
  }
  for (const char* changing :
       {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"})
    if (!list->is_tuple && name == changing)
      jinja_error(cat("a template cannot change a list with ", name, "()"));
  return {};
}

// -- attributes named by filters: "a", "a.b", 0

Value named_attribute(Value value, const Value& name) {
  if (name.is_integer()) return jinja_item(value, name);
  for (const Value& part : split(string_of(name, "the attribute"), ".", -1, false)) {
    int64_t index = 0;
    const std::string& text = part.string();
    const bool number = std::from_chars(text.data(), text.data() + text.size(), index).ptr ==
                        text.data() + text.size();
    value = jinja_item(value, number && !text.empty() ? Value(index) : part);
  }
  return value;
}

Value sort_key(const Value& value, const Value* attribute, bool case_sensitive) {
  Value key =
      attribute != nullptr && !attribute->is_none() ? named_attribute(value, *attribute) : value;
  return key.is_string() && !case_sensitive ? Value(python_lower_case(key.string())) : key;
}

Arguments rest_of(const Arguments& all, size_t first) {
  Arguments rest;
  for (size_t i = first; i < all.positional.size(); ++i)
    rest.positional.push_back(all.positional[i]);
  rest.named = all.named;
  return rest;
}

// select, reject, selectattr, rejectattr.
Value chosen(const Value& value, Arguments& a, bool keep, bool by_attribute) {
  const size_t first = by_attribute ? 1 : 0;
  if (by_attribute && a.positional.empty()) jinja_error("needs the name of an attribute");
  std::vector<Value> out;
  if (!value.truth()) return Value::list({});
  for (const Value& item : jinja_elements(value)) {
    const Value tested = by_attribute ? named_attribute(item, a.positional[0]) : item;
    bool holds = tested.truth();
    if (a.positional.size() > first) {
      Arguments rest = rest_of(a, first + 1);
      holds = apply_jinja_test(string_of(a.positional[first], "the test"), tested, rest);
    }
    if (holds == keep) out.push_back(item);
  }
  return Value::list(std::move(out));
}

Value mapped(const Value& value, Arguments& a) {
  std::vector<Value> out;
  const Value* attribute = a.positional.empty() ? a.find(0, "attribute") : nullptr;
  const Value* otherwise =
      attribute != nullptr ? a.find(static_cast<size_t>(-1), "default") : nullptr;
  if (attribute == nullptr && a.positional.empty()) jinja_error("needs a filter, or attribute=");
  if (!value.truth()) return Value::list({});
  for (const Value& item : jinja_elements(value)) {
    if (attribute != nullptr) {
      Value found = named_attribute(item, *attribute);
      out.push_back(found.is_undefined() && otherwise != nullptr ? *otherwise : found);
    } else {
      Arguments rest = rest_of(a, 1);
      out.push_back(apply_jinja_filter(string_of(a.positional[0], "the filter"), item, rest));
    }
  }
  return Value::list(std::move(out));
}

Value json_filter(const Value& value, Arguments& a) {
  refuse_undefined(value);
  JinjaJsonStyle style;
  style.ensure_ascii = a.get(0, "ensure_ascii", false).truth();
  const Value indent = a.get(1, "indent", JinjaNone{});
  if (!indent.is_none()) style.indent = integer_of(indent, "indent");
  const Value separators = a.get(2, "separators", JinjaNone{});
  if (!separators.is_none()) {
    const std::vector<Value> both = jinja_elements(separators);
    if (both.size() != 2) jinja_error("separators are two strings");
    style.item_separator = string_of(both[0], "a separator");
    style.key_separator = string_of(both[1], "a separator");
  }
  style.sort_keys = a.get(3, "sort_keys", false).truth();
  a.check_all_used(4);
  if (style.indent > 64) jinja_error("indent is larger than 64");
  return jinja_json(value, style);
}

Value indented(const Value& value, Arguments& a) {
  const std::string text = jinja_text(value);
  const Value width = a.get(0, "width", int64_t{4});
  const bool first = a.get(1, "first", false).truth(), blank = a.get(2, "blank", false).truth();
  a.check_all_used(3);
  const std::string by =
      width.is_string() ? width.string() : repeated(" ", integer_of(width, "width"));
  std::string out;
  bool first_line = true;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    const bool whole = first_line ? first : blank || !line.empty();
    if (!first_line) out += '\n';
    out += (whole ? by : "") + line;
    jinja_check_room(out.size());
    first_line = false;
    at = end + 1;
  }
  return out;
}

// Python's int() of text; nullopt: not a number.
std::optional<int64_t> parsed_integer(const std::string& text, int base) {
  std::string digits = python_stripped(text, nullptr, true, true);
  std::erase(digits, '_');
  const char* begin = digits.data() + (digits.starts_with('+') ? 1 : 0);
  int64_t value = 0;
  const auto result = std::from_chars(begin, digits.data() + digits.size(), value, base);
  if (result.ec != std::errc() || result.ptr != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::optional<double> parsed_float(const std::string& text) {
  const std::string digits = python_stripped(text, nullptr, true, true);
  const char* begin = digits.data() + (digits.starts_with('+') ? 1 : 0);
  double value = 0;
  const auto result = std::from_chars(begin, digits.data() + digits.size(), value);
  if (result.ec != std::errc() || result.ptr != digits.data() + digits.size()) return std::nullopt;
  return value;
}

Value to_integer(const Value& value, Arguments& a) {
  refuse_undefined(value);
  const Value otherwise = a.get(0, "default", int64_t{0});
  const int64_t base = integer_of(a.get(1, "base", int64_t{10}), "base");
  a.check_all_used(2);
  if (value.is_float()) {
    if (!std::isfinite(value.number()) || std::abs(value.number()) > 9e18) return otherwise;
    return static_cast<int64_t>(value.number());
  }
  if (value.is_number()) return value.integer();
  if (!value.is_string()) return otherwise;
  if (base < 2 || base > 36) return otherwise;
  if (const auto whole = parsed_integer(value.string(), static_cast<int>(base))) return *whole;
  const std::optional<double> real = parsed_float(value.string());
  return real && std::isfinite(*real) && std::abs(*real) < 9e18 ? Value(static_cast<int64_t>(*real))
                                                                : otherwise;
}

Value rounded(const Value& value, Arguments& a) {
  refuse_undefined(value);
  if (!value.is_number()) jinja_error(cat("of type ", value.type_name(), " cannot be rounded"));
  const int64_t digits = integer_of(a.get(0, "precision", int64_t{0}), "precision");
  const std::string method = string_of(a.get(1, "method", Value::text("common")), "method");
  a.check_all_used(2);
  const double scale = std::pow(10.0, static_cast<double>(digits)), scaled = value.number() * scale;
  if (method == "ceil") return std::ceil(scaled) / scale;
  if (method == "floor") return std::floor(scaled) / scale;
  if (method != "common")
    jinja_error(cat("method ", method, " is unknown, expected common, ceil or floor"));
  char text[400];
  std::snprintf(text, sizeof text, "%.*f", static_cast<int>(std::clamp<int64_t>(digits, 0, 30)),
                value.number());
  return digits >= 0 ? std::strtod(text, nullptr) : std::nearbyint(scaled) / scale;
}

Value sorted(const Value& value, Arguments& a) {
  const bool reverse = a.get(0, "reverse", false).truth(),
             case_sensitive = a.get(1, "case_sensitive", false).truth();
  const Value* attribute = a.find(2, "attribute");
  a.check_all_used(3);
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : jinja_elements(value))
    keyed.emplace_back(sort_key(item, attribute, case_sensitive), item);
  // A merge sort is safe even for an inconsistent order (with NaN).
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& x, const auto& y) {
    return reverse ? less(y.first, x.first) : less(x.first, y.first);
  });
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return Value::list(std::move(out));
}

Value unique(const Value& value, Arguments& a) {
  const bool case_sensitive = a.get(0, "case_sensitive", false).truth();
  const Value* attribute = a.find(1, "attribute");
  a.check_all_used(2);
  std::vector<Value> keys, out;
  for (const Value& item : jinja_elements(value)) {
    Value key = sort_key(item, attribute, case_sensitive);
    jinja_charge(keys.size());
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& own) { return equal(own, key); }))
      continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return Value::list(std::move(out));
}

Value extreme(const Value& value, Arguments& a, bool largest) {
  const bool case_sensitive = a.get(0, "case_sensitive", false).truth();
  const Value* attribute = a.find(1, "attribute");
  a.check_all_used(2);
  const std::vector<Value> items = jinja_elements(value);
  if (items.empty()) return Value(JinjaUndefined{"No aggregated item, sequence was empty."});
  const Value* best = &items[0];
  for (const Value& item : items) {
    const Value own = sort_key(item, attribute, case_sensitive),
                other = sort_key(*best, attribute, case_sensitive);
    if (largest ? less(other, own) : less(own, other)) best = &item;
  }
  return *best;
}

Value joined(const Value& value, Arguments& a) {
  const std::string by = jinja_text(a.get(0, "d", Value::text("")));
  const Value* attribute = a.find(1, "attribute");
  a.check_all_used(2);
  std::string out;
  bool first = true;
  for (const Value& item : jinja_elements(value)) {
    if (!first) out += by;
    first = false;
    out += jinja_text(
        attribute != nullptr && !attribute->is_none() ? named_attribute(item, *attribute) : item);
    jinja_check_room(out.size());
  }
  return out;
}

Value dict_sorted(const Value& value, Arguments& a) {
  if (!value.is_mapping()) jinja_error(cat("of type ", value.type_name(), ", expected dict"));
  const bool case_sensitive = a.get(0, "case_sensitive", false).truth();
  const std::string by = string_of(a.get(1, "by", Value::text("key")), "by");
  const bool reverse = a.get(2, "reverse", false).truth();
  a.check_all_used(3);
  Arguments how;
  how.named = {{"reverse", reverse},
               {"case_sensitive", case_sensitive},
               {"attribute", Value(int64_t{by == "value"})}};
  return sorted(dict_items(*value.mapping()), how);
}

Value summed(const Value& value, Arguments& a) {
  const Value* attribute = a.find(0, "attribute");
  Value total = a.get(1, "start", int64_t{0});
  a.check_all_used(2);
  for (const Value& item : jinja_elements(value))
    total = jinja_binary(
        "+", total,
        attribute != nullptr && !attribute->is_none() ? named_attribute(item, *attribute) : item);
  return total;
}

Value escaped(const Value& value, Arguments& a) {
  a.check_all_used(0);
  std::string out;
  const std::string text = jinja_text(value);
  jinja_check_room(5 * text.size());  // the longest of these replacements
  constexpr std::string_view kSpecial = "&<>\"'";
  constexpr const char* kEntities[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
  for (const char c : text) {
    const size_t at = kSpecial.find(c);
    at == kSpecial.npos ? out += c : out += kEntities[at];
  }
  return out;
}

// Python's "..." % values, for %s, %r, %d and %%.
std::string formatted(const std::string& format, const std::vector<Value>& values) {
  std::string out;
  size_t next = 0;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    const char kind = ++i < format.size() ? format[i] : '\0';
    if (kind == '%') {
      out += '%';
      continue;
    }
    if (next == values.size()) jinja_error("not enough arguments for format string");
    const Value& value = values[next++];
    jinja_check_room(out.size());
    if (kind == 's') {
      out += jinja_text(value);
    } else if (kind == 'r') {
      out += jinja_repr(value);
    } else if (kind == 'd' && value.is_number()) {
      out +=
          std::to_string(value.is_float() ? static_cast<int64_t>(value.number()) : value.integer());
    } else {
      jinja_error(cat("the format %", std::string(1, kind), " of ", value.type_name(),
                      " is not supported, expected %s, %r or %d"));
    }
  }
  if (next < values.size()) jinja_error("not all arguments converted during string formatting");
  return out;
}

int64_t length_of(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_string()) return python_length(value.string());
  if (value.is_sequence()) return static_cast<int64_t>(value.items().size());
  if (value.is_mapping() && !value.mapping()->is_namespace)
    return static_cast<int64_t>(value.mapping()->entries.size());
  jinja_error(cat("object of type ", value.type_name(), " has no length"));
}

// Filters without arguments.
template <class Fn>
Value alone(Arguments& a, const Fn& result) {
  a.check_all_used(0);
  return Value(result());
}

using Filter = Value (*)(const Value&, Arguments&);

const std::map<std::string_view, Filter>& filters() {
  static const std::map<std::string_view, Filter> kFilters = [] {
    std::map<std::string_view, Filter> f = {
        {"abs",
         [](const Value& v, Arguments& a) {
           refuse_undefined(v);
           if (!v.is_number()) jinja_error(cat("of type ", v.type_name(), ", expected a number"));
           a.check_all_used(0);
           return v.is_float() ? Value(std::abs(v.number()))
                               : Value(v.integer() < 0 ? -v.integer() : v.integer());
         }},
        {"attr",
         [](const Value& v, Arguments& a) {
           const std::string name = string_of(a.get(0, "name", {}), "the name");
           a.check_all_used(1);
           return jinja_attribute(v, name);
         }},
        {"batch",
         [](const Value& v, Arguments& a) {
           const int64_t count = integer_of(a.get(0, "linecount", {}), "the size of a batch");
           const Value* fill = a.find(1, "fill_with");
           a.check_all_used(2);
           if (count < 1) jinja_error("the size of a batch is below 1");
           std::vector<Value> out, row;
           for (const Value& item : jinja_elements(v)) {
             if (static_cast<int64_t>(row.size()) == count)
               out.push_back(Value::list(std::exchange(row, {})));
             row.push_back(item);
           }
           if (row.empty()) return Value::list(std::move(out));
           if (fill != nullptr && !fill->is_none())
             jinja_check_room(sizeof(Value) *
                              static_cast<uint64_t>(std::min<int64_t>(count, INT32_MAX)));
           while (fill != nullptr && !fill->is_none() && static_cast<int64_t>(row.size()) < count)
             row.push_back(*fill);
           out.push_back(Value::list(std::move(row)));
           return Value::list(std::move(out));
         }},
        {"capitalize",
         [](const Value& v, Arguments& a) {
           return alone(a, [&] { return python_capitalized(jinja_text(v)); });
         }},
        {"default",
         [](const Value& v, Arguments& a) {
           const Value otherwise = a.get(0, "default_value", Value::text(""));
           const bool also_false = a.get(1, "boolean", false).truth();
           a.check_all_used(2);
           return v.is_undefined() || (also_false && !v.truth()) ? otherwise : v;
         }},
        {"dictsort", dict_sorted},
        {"escape", escaped},
        {"first",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           const std::vector<Value> items = jinja_elements(v);
           return items.empty() ? Value(JinjaUndefined{"No first item, sequence was empty."})
                                : items.front();
         }},
        {"float",
         [](const Value& v, Arguments& a) {
           refuse_undefined(v);
           const Value otherwise = a.get(0, "default", 0.0);
           a.check_all_used(1);
           if (v.is_number()) return Value(v.number());
           const std::optional<double> parsed =
               v.is_string() ? parsed_float(v.string()) : std::nullopt;
           return parsed ? Value(*parsed) : otherwise;
         }},
        {"format", [](const Value& v,
                      Arguments& a) { return Value(formatted(jinja_text(v), a.positional)); }},
        {"indent", indented},
        {"int", to_integer},
        {"items",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           if (v.is_undefined()) return Value::list({});
           if (!v.is_mapping()) jinja_error("Can only get item pairs from a mapping.");
           return dict_items(*v.mapping());
         }},
        {"join", joined},
        {"last",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           const std::vector<Value> items = jinja_elements(v);
           return items.empty() ? Value(JinjaUndefined{"No last item, sequence was empty."})
                                : items.back();
         }},
        {"length",
         [](const Value& v, Arguments& a) { return alone(a, [&] { return length_of(v); }); }},
        {"list",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           return Value::list(jinja_elements(v));
         }},
        {"lower",
         [](const Value& v, Arguments& a) {
           return alone(a, [&] { return python_lower_case(jinja_text(v)); });
         }},
        {"map", mapped},
        {"max", [](const Value& v, Arguments& a) { return extreme(v, a, true); }},
        {"min", [](const Value& v, Arguments& a) { return extreme(v, a, false); }},
        {"reject", [](const Value& v, Arguments& a) { return chosen(v, a, false, false); }},
        {"rejectattr", [](const Value& v, Arguments& a) { return chosen(v, a, false, true); }},
        {"replace",
         [](const Value& v, Arguments& a) {
           const std::string from = jinja_text(a.get(0, "old", {})),
                             to = jinja_text(a.get(1, "new", {}));
           const Value count = a.get(2, "count", JinjaNone{});
           a.check_all_used(3);
           return Value(replaced(jinja_text(v), from, to,
                                 count.is_none() ? -1 : integer_of(count, "count")));
         }},
        {"reverse",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           std::vector<Value> items = jinja_elements(v);
           std::reverse(items.begin(), items.end());
           if (!v.is_string()) return Value::list(std::move(items));
           std::string out;
           for (const Value& c : items) out += c.string();
           return Value(std::move(out));
         }},
        {"round", rounded},
        {"safe",
         [](const Value& v, Arguments& a) { return alone(a, [&] { return jinja_text(v); }); }},
        {"select", [](const Value& v, Arguments& a) { return chosen(v, a, true, false); }},
        {"selectattr", [](const Value& v, Arguments& a) { return chosen(v, a, true, true); }},
        {"sort", sorted},
        {"string",
         [](const Value& v, Arguments& a) { return alone(a, [&] { return jinja_text(v); }); }},
        {"sum", summed},
        {"title",
         [](const Value& v, Arguments& a) {
           return alone(a, [&] { return filter_title(jinja_text(v)); });
         }},
        {"tojson", json_filter},
        {"trim",
         [](const Value& v, Arguments& a) { return strip_method(jinja_text(v), a, true, true); }},
        {"unique", unique},
        {"upper",
         [](const Value& v, Arguments& a) {
           return alone(a, [&] { return python_upper_case(jinja_text(v)); });
         }},
        {"wordcount",
         [](const Value& v, Arguments& a) {
           a.check_all_used(0);
           return Value(static_cast<int64_t>(split_blanks(jinja_text(v), -1).size()));
         }},
    };
    f["d"] = f["default"];
    f["e"] = f["escape"];
    f["count"] = f["length"];
    return f;
  }();
  return kFilters;
}

bool whole_number(const Value& v) { return v.is_integer() || v.is_bool(); }

using Test = bool (*)(const Value&, Arguments&);

const std::map<std::string_view, Test>& tests() {
  static const std::map<std::string_view, Test> kTests = [] {
    std::map<std::string_view, Test> t = {
        {"defined", [](const Value& v, Arguments&) { return !v.is_undefined(); }},
        {"undefined", [](const Value& v, Arguments&) { return v.is_undefined(); }},
        {"none", [](const Value& v, Arguments&) { return v.is_none(); }},
        {"boolean", [](const Value& v, Arguments&) { return v.is_bool(); }},
        {"true", [](const Value& v, Arguments&) { return v.is_bool() && v.truth(); }},
        {"false", [](const Value& v, Arguments&) { return v.is_bool() && !v.truth(); }},
        {"integer", [](const Value& v, Arguments&) { return v.is_integer(); }},
        {"float", [](const Value& v, Arguments&) { return v.is_float(); }},
        {"number", [](const Value& v, Arguments&) { return v.is_number(); }},
        {"string", [](const Value& v, Arguments&) { return v.is_string(); }},
        {"mapping",
         [](const Value& v, Arguments&) { return v.is_mapping() && !v.mapping()->is_namespace; }},
        {"sequence",
         [](const Value& v, Arguments&) {
           return v.is_string() || v.is_sequence() || v.is_undefined() ||
                  (v.is_mapping() && !v.mapping()->is_namespace);
         }},
        {"iterable",
         [](const Value& v, Arguments&) {
           return v.is_string() || v.is_sequence() || v.is_undefined() ||
                  (v.is_mapping() && !v.mapping()->is_namespace);
         }},
        {"callable", [](const Value& v, Arguments&) { return v.is_callable(); }},
        {"lower",
         [](const Value& v, Arguments&) {
           const std::string text = jinja_text(v);
           return text == python_lower_case(text) && text != python_upper_case(text);
         }},
        {"upper",
         [](const Value& v, Arguments&) {
           const std::string text = jinja_text(v);
           return text == python_upper_case(text) && text != python_lower_case(text);
         }},
        {"odd",
         [](const Value& v, Arguments&) {
           return whole_number(v) ? v.integer() % 2 != 0 : (jinja_error("needs an int"), false);
         }},
        {"even",
         [](const Value& v, Arguments&) {
           return whole_number(v) ? v.integer() % 2 == 0 : (jinja_error("needs an int"), false);
         }},
        {"divisibleby",
         [](const Value& v, Arguments& a) {
           const int64_t by = integer_of(a.get(0, "num", {}), "the divisor");
           if (by == 0) jinja_error("division by zero");
           return integer_of(v, "the value") % by == 0;
         }},
        {"eq", [](const Value& v, Arguments& a) { return equal(v, a.get(0, "other", {})); }},
        {"ne", [](const Value& v, Arguments& a) { return !equal(v, a.get(0, "other", {})); }},
        {"lt", [](const Value& v, Arguments& a) { return less(v, a.get(0, "other", {})); }},
        {"gt", [](const Value& v, Arguments& a) { return less(a.get(0, "other", {}), v); }},
        {"le",
         [](const Value& v, Arguments& a) {
           const Value o = a.get(0, "other", {});
           return less(v, o) || equal(v, o);
         }},
        {"ge",
         [](const Value& v, Arguments& a) {
           const Value o = a.get(0, "other", {});
           return less(o, v) || equal(v, o);
         }},
        {"in", [](const Value& v, Arguments& a) { return jinja_contains(a.get(0, "seq", {}), v); }},
        {"sameas",
         [](const Value& v, Arguments& a) {
           const Value o = a.get(0, "other", {});
           return std::string_view(v.type_name()) == o.type_name() && equal(v, o);
         }},
        {"filter", [](const Value& v,
                      Arguments&) { return v.is_string() && filters().contains(v.string()); }},
    };
    t["equalto"] = t["=="] = t["eq"];
    t["!="] = t["ne"];
    t["lessthan"] = t["<"] = t["lt"];
    t["greaterthan"] = t[">"] = t["gt"];
    t["<="] = t["le"];
    t[">="] = t["ge"];
    return t;
  }();
  return kTests;
}

Value integer_result(const std::string& op, int64_t x, int64_t y) {
  int64_t out = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(x, y, &out);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(x, y, &out);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(x, y, &out);
  } else if (op == "**") {
    if (y < 0) return std::pow(static_cast<double>(x), static_cast<double>(y));
    out = 1;
    for (int64_t i = 0; i < y && !overflow && out != 0 && !(x == 1 && i > 0); ++i) {
      overflow = __builtin_mul_overflow(out, x, &out);
      if (x == -1 && i > 1) return y % 2 == 0 ? int64_t{1} : int64_t{-1};
    }
  } else {
    if (y == 0) jinja_error("division by zero");
    if (op == "/") return static_cast<double>(x) / static_cast<double>(y);
    if (x == INT64_MIN && y == -1) jinja_error("the number is too large");
    const int64_t quotient = x / y - ((x % y != 0 && (x < 0) != (y < 0)) ? 1 : 0);
    return op == "//" ? quotient : x - quotient * y;
  }
  if (overflow) jinja_error("the number is too large");
  return out;
}

Value float_result(const std::string& op, double x, double y) {
  if (op == "+") return x + y;
  if (op == "-") return x - y;
  if (op == "*") return x * y;
  if (op == "**") return std::pow(x, y);
  if (y == 0) jinja_error("division by zero");
  if (op == "/") return x / y;
  if (op == "//") return std::floor(x / y);
  const double rest = std::fmod(x, y);
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

}  // namespace

JinjaValue apply_jinja_filter(const std::string& name, const JinjaValue& value,
                              JinjaArguments& arguments) {
  const auto found = filters().find(name);
  if (found == filters().end()) jinja_error(cat("there is no filter named ", name));
  charge_scan(value);
  return found->second(value, arguments);
}

bool apply_jinja_test(const std::string& name, const JinjaValue& value, JinjaArguments& arguments) {
  const auto found = tests().find(name);
  if (found == tests().end()) jinja_error(cat("there is no test named ", name));
  charge_scan(value);
  const bool holds = found->second(value, arguments);
  arguments.check_all_used(1);
  return holds;
}

JinjaValue jinja_attribute(const JinjaValue& value, const std::string& name) {
  refuse_undefined(value);
  if (value.is_string()) {
    if (const auto found = string_methods().find(name); found != string_methods().end())
      return jinja_function([text = value, method = found->second](Arguments& a) {
        charge_scan(text);
        return method(text.string(), a);
      });
  } else if (value.is_sequence()) {
    if (Value method = list_method(value.sequence(), name); method.is_callable()) return method;
  } else if (value.is_mapping()) {
    if (!value.mapping()->is_namespace)
      if (Value method = dict_method(value.mapping(), name); method.is_callable()) return method;
    if (const Value* entry = value.mapping()->find(std::string_view(name))) return *entry;
  }
  return JinjaUndefined{cat("'", value.is_none() ? "None" : cat(value.type_name(), " object"),
                            "' has no attribute '", name, "'")};
}

JinjaValue jinja_item(const JinjaValue& value, const JinjaValue& key) {
  refuse_undefined(value);
  if (value.is_mapping() && !value.mapping()->is_namespace) {
    if (const Value* entry = value.mapping()->find(key)) return *entry;
  } else if (whole_number(key) && (value.is_sequence() || value.is_string())) {
    charge_scan(value);
    const int64_t count = length_of(value),
                  index = key.integer() < 0 ? key.integer() + count : key.integer();
    if (index >= 0 && index < count) {
      if (value.is_sequence()) return value.items()[static_cast<size_t>(index)];
      const std::string& text = value.string();
      const size_t begin = python_offset(text, index);
      return text.substr(begin, python_offset(text, index + 1) - begin);
    }
    return JinjaUndefined{cat(value.type_name(), " object has no element ", key.integer())};
  }
  if (key.is_string()) return jinja_attribute(value, key.string());
  return JinjaUndefined{cat(value.type_name(), " object has no element ", jinja_repr(key))};
}

bool jinja_contains(const JinjaValue& all, const JinjaValue& item) {
  if (all.is_string()) {
    refuse_undefined(item);
    if (!item.is_string())
      jinja_error(cat("'in <string>' requires string as left operand, not ", item.type_name()));
    charge_scan(all);
    return all.string().find(item.string()) != std::string::npos;
  }
  if (all.is_mapping() && !all.mapping()->is_namespace) return all.mapping()->find(item) != nullptr;
  if (all.is_undefined()) return false;
  if (!all.is_sequence())
    jinja_error(cat("argument of type ", all.type_name(), " is not iterable"));
  jinja_charge(all.items().size());
  return std::any_of(all.items().begin(), all.items().end(),
                     [&](const Value& own) { return equal(own, item); });
}

std::vector<JinjaValue> jinja_elements(const JinjaValue& value) {
  if (value.is_undefined()) return {};
  if (value.is_sequence()) {
    jinja_charge(value.items().size() * sizeof(Value) / 4);  // a short-lived copy
    return value.items();
  }
  std::vector<Value> out;
  if (value.is_string()) {
    for (std::string& c : python_characters(value.string())) out.emplace_back(std::move(c));
  } else if (value.is_mapping() && !value.mapping()->is_namespace) {
    for (const auto& [key, entry] : value.mapping()->entries) out.push_back(key);
  } else {
    jinja_error(cat("'", value.type_name(), "' object is not iterable"));
  }
  return out;
}

JinjaValue jinja_binary(const std::string& op, const JinjaValue& a, const JinjaValue& b) {
  if (op == "~") return concatenated(jinja_text(a), jinja_text(b));
  refuse_undefined(a);
  refuse_undefined(b);
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return float_result(op, a.number(), b.number());
    return integer_result(op, a.integer(), b.integer());
  }
  if (op == "+") {
    if (a.is_string() && b.is_string()) return concatenated(a.string(), b.string());
    if (a.is_sequence() && b.is_sequence() && a.sequence()->is_tuple == b.sequence()->is_tuple) {
      jinja_check_room((a.items().size() + b.items().size()) * sizeof(Value));
      std::vector<Value> items = a.items();
      items.insert(items.end(), b.items().begin(), b.items().end());
      if (items.size() > 1'000'000) jinja_error("the list is too long");
      return a.sequence()->is_tuple ? Value::tuple(std::move(items))
                                    : Value::list(std::move(items));
    }
    if (a.is_string() || b.is_string())
      jinja_error(cat("can only concatenate str to str, not ",
                      a.is_string() ? b.type_name() : a.type_name()));
  }
  if (op == "*" && (a.is_string() || b.is_string()) && (whole_number(a) || whole_number(b)))
    return a.is_string() ? repeated(a.string(), b.integer()) : repeated(b.string(), a.integer());
  if (op == "%" && a.is_string())
    return formatted(a.string(),
                     b.is_sequence() && b.sequence()->is_tuple ? b.items() : std::vector<Value>{b});
  jinja_error(
      cat("unsupported operand types for ", op, ": ", a.type_name(), " and ", b.type_name()));
}

}  // namespace megatron
