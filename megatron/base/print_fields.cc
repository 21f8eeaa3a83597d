// Fields as text: --help, YAML and JSON.
#include <algorithm>
#include <cctype>
#include <functional>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"

namespace megatron {
namespace {

// The placeholder after the flag in help: "N", "{gelu,swiglu}", empty for a switch.
std::string placeholder(const FieldInfo& field) {
  switch (field.kind) {
    case FieldKind::kBool:
      return "";
    case FieldKind::kInt:
    case FieldKind::kOptionalInt:
      return "N";
    case FieldKind::kDouble:
    case FieldKind::kOptionalDouble:
      return "X";
    case FieldKind::kString:
      return "TEXT";
    case FieldKind::kIntList:
      return "N ...";
    case FieldKind::kDoubleList:
      return "X ...";
    case FieldKind::kStringList:
      return "TEXT ...";
    case FieldKind::kChoice:
      break;
  }
  return "{" + listed(field.spellings, {}, ",") + "}";
}

// The default as help shows it; empty if there is none to show.
std::string shown_default(const FieldInfo& field) {
  if (field.kind == FieldKind::kBool)
    return std::get<bool>(field.value) == field.negative ? "" : "on";
  if (std::holds_alternative<std::monostate>(field.value)) return "";
  return format_value(field.value);
}

// Appends words to `out`, whose line is at column `indent`, breaking lines before column 100.
void append_wrapped(std::string& out, std::string_view text, size_t indent) {
  size_t column = indent;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    begin = end + 1;
    if (word.empty()) continue;
    if (column > indent && column + 1 + word.size() > 100) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    }
    if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  out += '\n';
}

struct JsonValue {
  JsonWriter& json;
  void operator()(std::monostate) const { json.null(); }
  template <class T>
  void operator()(const T& v) const {
    json.value(v);
  }
};

void write_json_value(JsonWriter& json, const FieldValue& value) {
  std::visit(JsonValue{json}, value);
}

// Whether YAML reads the unquoted text as that string, also in version 1.1, where "no" and "1:30"
// mean other things.
bool is_plain_yaml(std::string_view text) {
  static const std::set<std::string, std::less<>> kOther = {"null", "true", "false", "yes", "no",
                                                            "on",   "off",  "y",     "n"};
  if (text.empty() || !(std::isalpha(static_cast<unsigned char>(text[0])) || text[0] == '/'))
    return false;
  std::string lower;
  for (const char c : text) {
    if (!(std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '/' ||
          c == '.'))
      return false;
    lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return kOther.count(lower) == 0;
}

std::string with_newline(std::string_view text) {
  return std::string(text) + (text.empty() || text.back() == '\n' ? "" : "\n");
}

// Lower case, with spaces for dashes and underscores, trimmed: "--Network_size" and "network size"
// are one name.
std::string simplified(std::string_view name) {
  std::string out;
  for (const char c : name) {
    const bool blank = c == '-' || c == '_' || c == ' ';
    if (!blank) out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (blank && !out.empty() && out.back() != ' ') out += ' ';
  }
  if (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

// The flags of the fields that `chosen` accepts, by group.
std::string help_of(const std::vector<FieldInfo>& fields,
                    const std::function<bool(const FieldInfo&)>& chosen) {
  constexpr size_t kIndent = 34;
  std::string out, group;
  bool first = true;
  for (const FieldInfo& field : fields) {
    if (!chosen(field)) continue;
    if (first || field.group != group)
      out += "\n" + (field.group.empty() ? "flags" : field.group) + ":\n";
    group = field.group;
    first = false;
    std::string line = "  ";
    for (const std::string& flag : field.flags) line += (line.size() > 2 ? ", " : "") + flag;
    if (const std::string value = placeholder(field); !value.empty()) line += " " + value;
    if (line.size() + 2 > kIndent)
      line += "\n" + std::string(kIndent, ' ');
    else
      line.append(kIndent - line.size(), ' ');
    out += line;
    const std::string by_default = shown_default(field);
    append_wrapped(out, field.help + (by_default.empty() ? "" : " (default " + by_default + ")"),
                   kIndent);
  }
  return out;
}

std::string list_of_groups(const std::vector<FieldInfo>& fields) {
  std::vector<std::pair<std::string, int>> groups;
  for (const FieldInfo& field : fields) {
    const auto at = std::find_if(groups.begin(), groups.end(),
                                 [&](const auto& g) { return g.first == field.group; });
    if (at == groups.end())
      groups.emplace_back(field.group, 1);
    else
      ++at->second;
  }
  const std::string names =
      listed(groups, [](const auto& g) { return cat(g.first, " (", g.second, ")"); });
  std::string out =
      "more: --help GROUP, --help WORD (flags whose names contain it), --help all; groups and "
      "their flags:\n  ";
  append_wrapped(out, names, 2);
  return out;
}

}  // namespace

std::string format_yaml(const FieldValue& value) {
  if (const auto* text = std::get_if<std::string>(&value); text != nullptr && is_plain_yaml(*text))
    return *text;
  JsonWriter json;
  write_json_value(json, value);
  return json.text();
}

std::string help_text(std::string_view usage, std::span<Config* const> configs) {
  return with_newline(usage) +
         help_of(describe_fields(configs), [](const FieldInfo&) { return true; });
}

std::optional<ParseResult> parse_or_help(std::string_view usage, std::span<Config* const> configs,
                                         int argc, const char* const* argv,
                                         const ParseOptions& options) {
  ParseResult parsed = parse_flags(configs, argc, argv, options);
  if (!parsed.help) return parsed;
  print_line(help_text(usage, configs));
  return std::nullopt;
}

std::string help_text(std::string_view usage, std::span<Config* const> configs,
                      std::string_view topic, std::span<const std::string_view> basics) {
  const std::vector<FieldInfo> fields = describe_fields(configs);
  const std::string wanted = simplified(topic);
  if (wanted == "all") return help_text(usage, configs);
  if (wanted.empty()) {
    return with_newline(usage) +
           help_of(fields,
                   [&](const FieldInfo& field) {
                     return std::find(basics.begin(), basics.end(), field.name) != basics.end();
                   }) +
           "\n" + list_of_groups(fields);
  }
  std::string text =
      help_of(fields, [&](const FieldInfo& field) { return simplified(field.group) == wanted; });
  if (text.empty())
    text = help_of(fields, [&](const FieldInfo& field) {
      return std::any_of(field.flags.begin(), field.flags.end(), [&](const std::string& flag) {
        return simplified(flag).find(wanted) != std::string::npos;
      });
    });
  if (text.empty())
    return cat("no group and no flag is called \"", topic, "\"\n\n", list_of_groups(fields));
  return text.substr(1);  // without the empty line above
}

std::string to_yaml(std::span<Config* const> configs) {
  std::string out, group;
  for (const FieldInfo& field : describe_fields(configs)) {
    if (field.group != group && !field.group.empty())
      out += (out.empty() ? "# " : "\n# ") + field.group + "\n";
    group = field.group;
    out += field.name + ": " + format_yaml(field.value) + "\n";
  }
  return out;
}

std::string to_json(std::span<Config* const> configs) {
  JsonWriter json(2);
  json.begin_object();
  for (const FieldInfo& field : describe_fields(configs)) {
    json.key(field.name);
    write_json_value(json, field.value);
  }
  return json.end_object().text();
}

}  // namespace megatron
