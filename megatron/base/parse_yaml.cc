// YAML run files: one map from field names to values.
#include <yaml-cpp/yaml.h>

#include "megatron/base/check.h"
#include "megatron/base/detail/flag_parser.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

// limit of a run file; usual ones have some kilobytes
constexpr uint64_t kMostBytes = uint64_t{1} << 20;
constexpr size_t kMostErrors = 100;  // maximum of reported errors
constexpr int kMostUnknown = 20;     // unknown names that are reported individually

std::string place(const std::string& path, const YAML::Mark& mark) {
  return mark.is_null() ? path + ": " : cat(path, ":", mark.line + 1, ": ");
}

// The texts of a scalar or of a list of scalars; nullopt if it is neither.
bool texts_of(const YAML::Node& node, std::vector<std::string>& texts) {
  if (node.IsNull()) return true;
  if (node.IsScalar()) {
    texts.push_back(node.Scalar());
    return true;
  }
  if (!node.IsSequence()) return false;
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) return false;
    texts.push_back(item.Scalar());
  }
  return true;
}

class Reader {
 public:
  Reader(FlagParser& parser, const std::string& path, const std::set<std::string>& keep,
         bool ignore_unknown)
      : parser_(parser), path_(path), keep_(keep), ignore_unknown_(ignore_unknown) {}

  void read(const YAML::Node& root) {
    if (root.IsNull() || !root.IsDefined()) return;  // an empty file
    if (!root.IsMap()) {
      parser_.violations.add(cat(path_, ": expected lines of \"name: value\" at the top level"));
      return;
    }
    for (const auto& pair : root) {
      if (parser_.violations.messages().size() > kMostErrors) {
        parser_.violations.add(
            cat(path_, ": more is wrong than ", kMostErrors, " things; the rest is not read"));
        return;
      }
      if (pair.first.IsScalar())
        entry(pair.first.Scalar(), pair.second, place(path_, pair.first.Mark()));
      else
        unreadable(place(path_, pair.first.Mark()) + "expected a name before the colon");
    }
    if (unknown_ > kMostUnknown)
      parser_.violations.add(cat(path_, ": ", unknown_ - kMostUnknown, " more names are unknown"));
  }

 private:
  void entry(const std::string& key, const YAML::Node& node, const std::string& where) {
    const std::string what = where + key;
    std::string flag = "--" + key;
    for (char& c : flag)
      if (c == '_') c = '-';
    const FlagParser::Target target = parser_.find_key(key);
    const KnownFlag* known = target.field == nullptr ? parser_.find_known(flag) : nullptr;
    if (target.field == nullptr && known == nullptr) {
      // Finding the nearest name takes time, so only the first ones get a suggestion.
      if (!ignore_unknown_ && ++unknown_ <= kMostUnknown)
        parser_.violations.add(cat(where, "unknown name ", shortened(key), suggestion(flag)));
      return;
    }
    if (!seen_.insert(target.field != nullptr ? target.field->name : flag).second) {
      parser_.violations.add(what + " is given twice");
      return;
    }
    std::vector<std::string> texts;
    if (!texts_of(node, texts))
      parser_.violations.add(what +
                             " holds a map or a nested list; expected a value or a list of values");
    else if (target.field != nullptr)
      field(target, node, texts, what);
    else if (!parser_.has_given(*known))  // flags take precedence over the file
      parser_.note_known(*known, what, texts,
                         node.IsNull() || (texts.size() == 1 && texts[0] == "false"));
  }

  void field(const FlagParser::Target& target, const YAML::Node& node,
             const std::vector<std::string>& texts, const std::string& what) {
    const FieldInfo& info = *target.field;
    // Flags take precedence over the file, but a value of the file that cannot be parsed is an
    // error all the same.
    const bool overridden = keep_.count(info.name) > 0;
    const std::map<std::string, FieldValue> before =
        overridden ? parser_.values : std::map<std::string, FieldValue>();
    if (node.IsNull() && info.is_optional()) {
      parser_.set_value(target, FieldValue());
    } else if (node.IsNull() && info.kind == FieldKind::kString) {
      parser_.set_value(target, std::string());
    } else if (node.IsSequence() && !info.is_list()) {
      parser_.failed.insert(info.name);
      parser_.violations.add(cat(what, " holds a list; expected ", info.expected()));
    } else {
      parser_.set(target, what, texts);
    }
    if (overridden) parser_.values = before;
  }

  // Input that is not an entry counts like an unknown name.
  void unreadable(const std::string& message) {
    if (++unknown_ <= kMostUnknown) parser_.violations.add(message);
  }

  static std::string shortened(const std::string& key) {
    constexpr size_t kLongest = 100;
    return key.size() <= kLongest ? key : key.substr(0, kLongest) + "...";
  }

  std::string suggestion(const std::string& flag) const {
    constexpr size_t kLongest = 100;
    if (flag.size() > kLongest) return "";
    std::string text = parser_.suggestion(flag);
    const size_t at = text.find("--");
    if (at == std::string::npos) return text;
    text.erase(at, 2);
    for (char& c : text)
      if (c == '-') c = '_';
    return text;
  }

  FlagParser& parser_;
  const std::string& path_;
  const std::set<std::string>& keep_;
  const bool ignore_unknown_;
  int64_t unknown_ = 0;
  std::set<std::string> seen_;
};

}  // namespace

bool FlagParser::read_yaml_file(const std::string& path, const std::set<std::string>& keep,
                                bool ignore_unknown) {
  try {
    const std::string text = read_file(path, kMostBytes);
    Reader(*this, path, keep, ignore_unknown).read(YAML::Load(text));
    return true;
  } catch (const YAML::Exception& error) {
    violations.add(cat(place(path, error.mark), "not YAML: ", error.msg));
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    violations.add(error.what());
  }
  return false;
}

}  // namespace megatron
