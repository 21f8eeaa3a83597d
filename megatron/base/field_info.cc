#include "megatron/base/field_info.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/parse.h"
#include "megatron/base/utf8.h"

namespace megatron {
namespace {

std::string default_flag(std::string_view name) {
  std::string flag = "--" + std::string(name);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

class Describer : public FieldVisitor {
 public:
  std::vector<FieldInfo> fields;

  using FieldVisitor::choice;
  // Starts the fields of another struct.
  void begin_struct() {
    begin_ = fields.size();
    role_ = FieldRole::kRun;
    group({});
  }
  void group(std::string_view title) override {
    group_ = title;
    place_ = fields.size();
    for (size_t i = begin_; i < fields.size(); ++i)
      if (fields[i].group == title) place_ = i + 1;
  }
  void list_after(std::string_view name) override {
    const auto at = std::find_if(fields.begin() + static_cast<std::ptrdiff_t>(begin_), fields.end(),
                                 [&](const FieldInfo& field) { return field.name == name; });
    MEGATRON_ASSERT(at != fields.end(), "no field ", name, " to list fields after");
    group_ = at->group;
    place_ = static_cast<size_t>(at - fields.begin()) + 1;
  }
  void role(FieldRole role) override { role_ = role; }
  void visit(FieldName n, FieldRef ref, std::string_view h) override {
    add(n, static_cast<FieldKind>(ref.index()),
        std::visit([](const auto* v) { return value_of(*v); }, ref), h);
  }
  void choice(FieldName n, int& index, std::span<const std::string_view> spellings,
              std::string_view h) override {
    MEGATRON_ASSERT(index >= 0 && static_cast<size_t>(index) < spellings.size(), n.name, " ",
                    index);
    add(n, FieldKind::kChoice, std::string(spellings[static_cast<size_t>(index)]), h)
        .spellings.assign(spellings.begin(), spellings.end());
  }

 private:
  template <class T>
  static FieldValue value_of(const T& value) {
    return value;
  }
  template <class T>
  static FieldValue value_of(const std::optional<T>& value) {
    return value ? FieldValue(*value) : FieldValue();
  }
  FieldInfo& add(FieldName name, FieldKind kind, FieldValue value, std::string_view help) {
    MEGATRON_ASSERT(names_.emplace(name.name).second, "two fields are named ", name.name);
    FieldInfo info;
    info.name = name.name;
    info.flags = name.flags.empty() ? std::vector{default_flag(name.name)} : split(name.flags);
    info.negative = name.negative;
    info.kind = kind;
    info.help = help;
    info.group = group_;
    info.role = role_;
    info.value = std::move(value);
    for (const std::string& flag : info.flags)
      MEGATRON_ASSERT(names_.insert(flag).second, "two fields have the flag ", flag);
    return *fields.insert(fields.begin() + static_cast<std::ptrdiff_t>(place_++), std::move(info));
  }

  std::string group_;
  FieldRole role_ = FieldRole::kRun;
  size_t begin_ = 0;  // index of the struct's first field
  size_t place_ = 0;  // index of the next field
  std::set<std::string> names_;
};

class Assigner : public FieldVisitor {
 public:
  explicit Assigner(const std::map<std::string, FieldValue>& values) : values_(values) {}

  using FieldVisitor::choice;
  void group(std::string_view) override {}
  void visit(FieldName n, FieldRef ref, std::string_view) override {
    if (const FieldValue* value = find(n)) std::visit([&](auto* v) { set(*v, *value); }, ref);
  }
  void choice(FieldName n, int& index, std::span<const std::string_view> spellings,
              std::string_view) override {
    const FieldValue* value = find(n);
    if (value == nullptr) return;
    const auto at = std::find(spellings.begin(), spellings.end(), std::get<std::string>(*value));
    MEGATRON_ASSERT(at != spellings.end(), n.name);
    index = static_cast<int>(at - spellings.begin());
  }

 private:
  const FieldValue* find(FieldName name) const {
    const auto found = values_.find(std::string(name.name));
    return found == values_.end() ? nullptr : &found->second;
  }
  template <class T>
  static void set(T& v, const FieldValue& value) {
    v = std::get<T>(value);
  }
  template <class T>
  static void set(std::optional<T>& v, const FieldValue& value) {
    const T* given = std::get_if<T>(&value);
    v = given != nullptr ? std::optional(*given) : std::nullopt;
  }
  const std::map<std::string, FieldValue>& values_;
};

// Parses one value, or adds a violation.
class ValueParser {
 public:
  ValueParser(const FieldInfo& field, std::string_view what, Violations& violations)
      : field_(field), what_(what), violations_(violations) {}

  std::optional<FieldValue> parse(std::span<const std::string> texts) {
    if (field_.is_list()) return parse_list(texts);
    if (texts.size() != 1) {
      violations_.add(cat(what_, " expects ", field_.expected(),
                          texts.empty() ? "" : cat(", found ", texts.size(), " values")),
                      legal_values());
      return std::nullopt;
    }
    const std::string& text = texts[0];
    if (field_.is_optional() && (text == "none" || text == "null")) return FieldValue();
    switch (field_.kind) {
      case FieldKind::kBool:
        return boolean(text);
      case FieldKind::kInt:
      case FieldKind::kOptionalInt:
        return wrap(integer(text));
      case FieldKind::kDouble:
      case FieldKind::kOptionalDouble:
        return wrap(number(text));
      case FieldKind::kChoice:
        return choice(text);
      default:
        return wrap(string(text));
    }
  }

 private:
  template <class T>
  static std::optional<FieldValue> wrap(std::optional<T> value) {
    if (!value) return std::nullopt;
    return FieldValue(std::move(*value));
  }

  void refuse(std::string_view text, std::string_view why, std::string hint = {}) {
    violations_.add(cat(what_, " \"", text, "\" ", why), std::move(hint));
  }

  std::string legal_values() const {
    return field_.spellings.empty() ? "" : "legal values: " + listed(field_.spellings);
  }

  std::optional<FieldValue> boolean(const std::string& text) {
    if (text == "true" || text == "True") return FieldValue(true);
    if (text == "false" || text == "False") return FieldValue(false);
    refuse(text, "is neither true nor false");
    return std::nullopt;
  }

  std::optional<int64_t> integer(std::string_view text) {
    int64_t value = 0;
    const std::string_view digits = text.starts_with('+') ? text.substr(1) : text;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc() && end == digits.data() + digits.size() && digits.data() != end)
      return value;
    if (error == std::errc::result_out_of_range)
      refuse(text, "does not fit in 64 bits");
    else
      refuse(text, "is not an integer");
    return std::nullopt;
  }

  std::optional<double> number(std::string_view text) {
    double value = 0;
    const std::string_view digits = text.starts_with('+') ? text.substr(1) : text;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc() && end == digits.data() + digits.size() && std::isfinite(value))
      return value;
    if (error == std::errc::result_out_of_range)
      refuse(text, "is outside the range of a 64-bit number");
    else
      refuse(text, "is not a finite number");
    return std::nullopt;
  }

  std::optional<FieldValue> choice(const std::string& text) {
    if (std::find(field_.spellings.begin(), field_.spellings.end(), text) != field_.spellings.end())
      return FieldValue(text);
    const std::string near = nearest(text, field_.spellings);
    refuse(text,
           near.empty() ? "is not one of its values"
                        : cat("is not one of its values; did you mean ", near, "?"),
           legal_values());
    return std::nullopt;
  }

  std::optional<std::string> string(const std::string& text) {
    if (is_valid_utf8(text)) return text;
    violations_.add(cat(what_, " is not UTF-8 text"));
    return std::nullopt;
  }

  std::optional<FieldValue> parse_list(std::span<const std::string> texts) {
    if (field_.kind == FieldKind::kStringList)
      return items<std::string>(texts, [this](const std::string& text) { return string(text); });
    std::vector<std::string> parts;
    for (const std::string& text : texts) {
      const std::vector<std::string> some = split(text, ',');
      if (some.empty()) parts.push_back(text);  // "" or ",": reported as it is
      parts.insert(parts.end(), some.begin(), some.end());
    }
    if (field_.kind == FieldKind::kIntList)
      return items<int64_t>(parts, [this](const std::string& text) { return integer(text); });
    return items<double>(parts, [this](const std::string& text) { return number(text); });
  }

  template <class T, class Parse>
  std::optional<FieldValue> items(std::span<const std::string> texts, Parse parse) {
    std::vector<T> values;
    for (const std::string& text : texts)
      if (auto value = parse(text)) values.push_back(std::move(*value));
    if (values.size() != texts.size()) return std::nullopt;
    return FieldValue(std::move(values));
  }

  const FieldInfo& field_;
  std::string_view what_;
  Violations& violations_;
};

}  // namespace

bool FieldInfo::is_list() const {
  return kind == FieldKind::kIntList || kind == FieldKind::kDoubleList ||
         kind == FieldKind::kStringList;
}

bool FieldInfo::is_optional() const {
  return kind == FieldKind::kOptionalInt || kind == FieldKind::kOptionalDouble;
}

std::string_view FieldInfo::expected() const {
  switch (kind) {
    case FieldKind::kBool:
      return "true or false";
    case FieldKind::kInt:
    case FieldKind::kOptionalInt:
      return "an integer";
    case FieldKind::kDouble:
    case FieldKind::kOptionalDouble:
      return "a number";
    case FieldKind::kIntList:
      return "one or more integers";
    case FieldKind::kDoubleList:
      return "one or more numbers";
    case FieldKind::kStringList:
      return "one or more values";
    case FieldKind::kChoice:
      return "one of its values";
    case FieldKind::kString:
      break;
  }
  return "a value";
}

std::vector<FieldInfo> describe_fields(std::span<Config* const> configs) {
  Describer describer;
  for (Config* config : configs) {
    describer.begin_struct();
    config->fields(describer);
  }
  return std::move(describer.fields);
}

void assign_fields(std::span<Config* const> configs,
                   const std::map<std::string, FieldValue>& values) {
  Assigner assigner(values);
  for (Config* config : configs) config->fields(assigner);
}

std::optional<FieldValue> parse_value(const FieldInfo& field, std::string_view what,
                                      std::span<const std::string> texts, Violations& violations) {
  return ValueParser(field, what, violations).parse(texts);
}

std::string format_double(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

namespace {

struct Format {
  std::string operator()(std::monostate) const { return "none"; }
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return format_double(v); }
  std::string operator()(const std::string& v) const { return v; }
  template <class T>
  std::string operator()(const std::vector<T>& v) const {
    return listed(v, [](const T& item) { return format_value(FieldValue(item)); }, " ");
  }
};

}  // namespace

std::string format_value(const FieldValue& value) { return std::visit(Format{}, value); }

}  // namespace megatron
