#include "megatron/base/parse.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/detail/flag_parser.h"
#include "megatron/base/detail/synonyms.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

std::string with(std::string text, char from, char to) {
  std::replace(text.begin(), text.end(), from, to);
  return text;
}

std::optional<double> as_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Equal as text, or as numbers ("1" and "1.0").
bool same_value(std::string_view a, std::string_view b) {
  if (a == b) return true;
  const auto x = as_number(a), y = as_number(b);
  return x && y && *x == *y;
}

// Spellings that follow from a bool's listed ones: --no-x for --x and the reverse.
std::vector<std::pair<std::string, bool>> opposite_flags(const FieldInfo& field) {
  std::vector<std::pair<std::string, bool>> out;
  if (field.kind != FieldKind::kBool) return out;
  for (const std::string& flag : field.flags) {
    if (!field.negative && !flag.starts_with("--no-"))
      out.emplace_back("--no-" + flag.substr(2), false);
    if (field.negative && flag.starts_with("--no-")) out.emplace_back("--" + flag.substr(5), true);
    if (field.negative && flag.starts_with("--disable-"))
      out.emplace_back("--" + flag.substr(10), true);
  }
  if (field.negative) out.emplace_back("--" + with(field.name, '_', '-'), true);
  return out;
}

// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

FlagParser::FlagParser(std::span<Config* const> configs, std::span<const KnownFlag> known,
                       std::span<const RefusedValue> refused_values)
    : refused_values_(refused_values), fields_(describe_fields(configs)) {
  for (const FieldInfo& field : fields_) {
    names_[field.name] = &field;
    for (const std::string& flag : field.flags) {
      flags_[flag] = {&field, !field.negative};
      suggestions_.push_back(flag);
    }
  }
  for (const FieldInfo& field : fields_)
    for (const auto& [flag, sense] : opposite_flags(field))
      flags_.try_emplace(flag, Target{&field, sense});
  for (const KnownFlag& entry : known) {
    for (const std::string& flag : split(entry.flag)) {
      known_[flag] = &entry;
      suggestions_.push_back(flag);
    }
  }
}

FlagParser::Target FlagParser::find_flag(const std::string& flag) const {
  const auto found = flags_.find(flag);
  return found == flags_.end() ? Target{} : found->second;
}

FlagParser::Target FlagParser::find_key(const std::string& key) const {
  const auto found = names_.find(with(key, '-', '_'));
  if (found != names_.end()) return {found->second, true};
  return find_flag("--" + with(key, '_', '-'));
}

const KnownFlag* FlagParser::find_known(const std::string& flag) const {
  const auto found = known_.find(flag);
  return found == known_.end() ? nullptr : found->second;
}

std::string FlagParser::suggestion(const std::string& flag) const {
  for (const std::string& ours : synonyms_of(flag))
    if (flags_.count(ours) > 0) return "; did you mean " + ours + "?";
  if (flag.size() < 4) return "";  // a single letter resembles anything
  const std::string near = nearest(with(flag, '_', '-'), suggestions_);
  return near.empty() ? near : "; did you mean " + near + "?";
}

const RefusedValue* FlagParser::refused_value(const FieldInfo& field,
                                              std::span<const std::string> texts) const {
  if (texts.size() != 1) return nullptr;
  for (const RefusedValue& refused : refused_values_) {
    const bool same_flag =
        std::find(field.flags.begin(), field.flags.end(), refused.flag) != field.flags.end();
    const std::vector<std::string> values = split(refused.values);
    if (same_flag && std::find(values.begin(), values.end(), texts[0]) != values.end())
      return &refused;
  }
  return nullptr;
}

void FlagParser::set(const Target& target, const std::string& what,
                     std::span<const std::string> texts) {
  if (const RefusedValue* refused = refused_value(*target.field, texts)) {
    failed.insert(target.field->name);
    violations.add(
        cat(what, " ", texts[0], " is refused: ", refused->reason),
        target.field->spellings.empty() ? "" : "legal values: " + listed(target.field->spellings));
    return;
  }
  auto value = parse_value(*target.field, what, texts, violations);
  if (!value) {
    failed.insert(target.field->name);
    return;
  }
  if (!target.sense) value = !std::get<bool>(*value);
  set_value(target, std::move(*value));
}

void FlagParser::note_known(const KnownFlag& known, const std::string& what,
                            std::span<const std::string> texts, bool off) {
  const auto count = static_cast<int>(texts.size());
  const bool switch_value =
      known.max_values == 0 && count == 1 && (texts[0] == "true" || texts[0] == "false");
  if (!off && !switch_value &&
      (count < known.min_values || (known.max_values >= 0 && count > known.max_values))) {
    violations.add(cat(what, known.max_values == 0 ? " takes no value"
                             : count < known.min_values
                                 ? " expects a value"
                                 : cat(" takes at most ", known.max_values, " values")));
    return;
  }
  for (const RefusedValue& refused : refused_values_)
    for (const std::string& text : texts)
      if (known.flag == refused.flag && std::ranges::count(split(refused.values), text) > 0) {
        violations.add(cat(what, " ", text, " is refused: ", refused.reason));
        return;
      }
  std::erase_if(given_known_, [&](const GivenFlag& given) { return given.known == &known; });
  const std::vector<std::string> neutral = split(known.neutral);
  const auto is_neutral = [&](const std::string& text) {
    return std::any_of(neutral.begin(), neutral.end(),
                       [&](const std::string& n) { return same_value(text, n); });
  };
  off = off || (switch_value && texts[0] == "false");
  if (off && known.kind == KnownFlag::Kind::kAlreadySo) return;  // has no effect
  const bool in_list = std::all_of(texts.begin(), texts.end(), is_neutral);
  if (known.kind == KnownFlag::Kind::kAlreadySo && !neutral.empty() && !in_list) {
    violations.add(cat(what, " \"", texts[0], "\" is not one of its values"),
                   cat("legal values: ", listed(neutral)));
    return;
  }
  off = off || (known.kind == KnownFlag::Kind::kRefused && count > 0 && in_list);
  std::string given = what;
  for (const std::string& text : texts) given += " " + text;
  given_known_.push_back(
      {&known, known.kind == KnownFlag::Kind::kRefused && !off ? what : given, off});
}

bool FlagParser::has_given(const KnownFlag& known) const {
  return std::any_of(given_known_.begin(), given_known_.end(),
                     [&](const GivenFlag& given) { return given.known == &known; });
}

void FlagParser::judge_known(const std::function<FlagVerdict(const KnownFlag&)>& judge) {
  for (const auto& [known, what, off] : given_known_) {
    FlagVerdict verdict{off || known->kind == KnownFlag::Kind::kAlreadySo,
                        std::string(known->reason)};
    if (judge && !off) verdict = judge(*known);
    if (verdict.accepted) {
      already_so.emplace_back(what, verdict.reason);
    } else {
      const bool has_values = known->kind == KnownFlag::Kind::kRefused && !known->neutral.empty();
      violations.add(cat(what, " is refused: ", verdict.reason),
                     has_values ? cat("accepted values: ", listed(split(known->neutral))) : "");
    }
  }
}

namespace {

// One pass over argv.
class CommandLine {
 public:
  CommandLine(FlagParser& parser, const ParseOptions& options, int argc, const char* const* argv)
      : parser_(parser), options_(options), arguments_(argv + std::min(argc, 1), argv + argc) {
    parser.also_suggest("--help");
    if (options.allow_config_file) parser.also_suggest("--config");
  }

  std::string config_file;
  std::set<std::string> given;  // names of fields
  std::vector<std::string> notes;
  std::string help_topic;

  // Returns false when help is asked for.
  bool parse() {
    const auto help = std::find_if(arguments_.begin(), arguments_.end(),
                                   [](const std::string& a) { return a == "--help" || a == "-h"; });
    if (help != arguments_.end()) {
      for (auto word = help + 1; word != arguments_.end(); ++word)
        help_topic += (help_topic.empty() ? "" : " ") + *word;
      return false;
    }
    while (next_ < arguments_.size()) {
      const std::string& argument = arguments_[next_++];
      if (is_flag(argument)) {
        flag(argument);
      } else if (is_letter_flag(argument)) {
        parser_.violations.add(cat("unknown flag ", argument, hint_for_dash(argument)));
        skip_values();
      } else {
        loose_.push_back(argument);
      }
    }
    positional();
    return true;
  }

 private:
  std::string hint_for_dash(const std::string& argument) const {
    const std::string near = parser_.suggestion("-" + argument);
    return near.empty() ? "; flags start with --" : near;
  }
  static bool is_flag(std::string_view token) {
    return token.size() > 2 && token.starts_with("--");
  }
  // A flag such as "-m", as in other programs; not a negative number.
  static bool is_letter_flag(std::string_view token) {
    return token.size() > 1 && token[0] == '-' &&
           std::isalpha(static_cast<unsigned char>(token[1]));
  }
  // Skips the values of an unknown flag.
  void skip_values() {
    while (value_follows() && !is_letter_flag(arguments_[next_])) ++next_;
  }
  bool value_follows() const { return next_ < arguments_.size() && !is_flag(arguments_[next_]); }

  // The values of the current flag: at most `limit` (-1: up to the next flag).
  std::vector<std::string> take_values(const std::optional<std::string>& attached, int limit) {
    if (attached) return {*attached};
    std::vector<std::string> texts;
    while (value_follows() && (limit < 0 || static_cast<int>(texts.size()) < limit))
      texts.push_back(arguments_[next_++]);
    return texts;
  }

  void take_switch_value(std::vector<std::string>& texts) {
    if (texts.empty() && value_follows() &&
        (arguments_[next_] == "true" || arguments_[next_] == "false"))
      texts.push_back(arguments_[next_++]);
  }

  // Of several occurrences the last one counts, as in argparse. Records a note.
  void note_repetition(const std::string& setting, const std::string& flag,
                       const std::vector<std::string>& texts) {
    const auto [at, inserted] = seen_.emplace(setting, flag);
    if (inserted) return;
    std::string last = flag;
    for (const std::string& text : texts) last += " " + text;
    notes.push_back(
        at->second == flag
            ? cat(flag, " is given more than once; the last one counts: ", last)
            : cat(at->second, " and ", flag, " set the same value; the last one counts: ", last));
    at->second = flag;
  }

  void flag(const std::string& argument) {
    const size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    std::optional<std::string> attached;
    if (equals != std::string::npos) attached = argument.substr(equals + 1);

    if (flag == "--config" && options_.allow_config_file) {
      const auto texts = take_values(attached, 1);
      note_repetition(flag, flag, texts);
      if (texts.empty() || texts[0].empty())
        parser_.violations.add("--config expects the name of a YAML file");
      else
        config_file = texts[0];
    } else if (const FlagParser::Target target = parser_.find_flag(flag); target.field != nullptr) {
      field(target, flag, attached);
    } else if (const KnownFlag* known = parser_.find_known(flag)) {
      auto texts = take_values(attached, known->max_values);
      if (known->max_values == 0) take_switch_value(texts);
      note_repetition(std::string(known->flag), flag, texts);
      parser_.note_known(*known, flag, texts, false);
    } else {
      parser_.violations.add(cat("unknown flag ", flag, parser_.suggestion(flag)));
      if (!attached) skip_values();
    }
  }

  void field(const FlagParser::Target& target, const std::string& flag,
             const std::optional<std::string>& attached) {
    const FieldInfo& info = *target.field;
    const bool is_switch = info.kind == FieldKind::kBool;
    auto texts = take_values(attached, is_switch ? 0 : info.is_list() ? -1 : 1);
    if (is_switch) take_switch_value(texts);
    note_repetition(info.name, flag, texts);
    if (is_switch && texts.empty()) texts.push_back("true");
    given.insert(info.name);
    if (info.is_list() && texts.empty()) {
      parser_.failed.insert(info.name);
      parser_.violations.add(cat(flag, " expects ", info.expected()));
      return;
    }
    parser_.set(target, flag, texts);
  }

  // Assigns positional arguments.
  void positional() {
    if (loose_.empty()) return;
    const FlagParser::Target target = parser_.find_key(std::string(options_.positional));
    size_t taken = 0;
    if (target.field != nullptr && given.count(target.field->name) == 0) {
      taken = target.field->is_list() ? loose_.size() : 1;
      given.insert(target.field->name);
      parser_.set(target, with(target.field->name, '_', ' '), std::span(loose_).first(taken));
    }
    for (size_t i = taken; i < loose_.size(); ++i)
      parser_.violations.add(cat("unexpected argument \"", loose_[i], "\"; flags start with --"));
  }

  FlagParser& parser_;
  const ParseOptions& options_;
  std::vector<std::string> arguments_;
  size_t next_ = 0;
  std::vector<std::string> loose_;
  std::map<std::string, std::string> seen_;  // setting -> the flag that gave it
};

bool mentions(std::string_view message, std::string_view flag) {
  for (size_t at = message.find(flag); at != std::string_view::npos;
       at = message.find(flag, at + 1)) {
    const size_t end = at + flag.size();
    if (end == message.size() ||
        !(message[end] == '-' || std::isalnum(static_cast<unsigned char>(message[end]))))
      return true;
  }
  return false;
}

// Adds the violations of the configs' own rules, except those about a field whose value could not
// be parsed: its default is not what the user wrote.
void validate(std::span<Config* const> configs, const ParseOptions& options, FlagParser& parser) {
  Violations found;
  for (Config* config : configs) config->validate(found);
  if (options.validate) options.validate(found);
  for (const std::string& message : found.messages()) {
    bool about_failed = false;
    for (const FieldInfo& field : parser.fields())
      for (const std::string& flag : field.flags)
        about_failed =
            about_failed || (parser.failed.count(field.name) > 0 && mentions(message, flag));
    if (!about_failed) parser.violations.add(message);
  }
}

}  // namespace

bool ParseResult::was_given(std::string_view name) const {
  return std::find(given.begin(), given.end(), name) != given.end();
}

ParseResult parse_flags(std::span<Config* const> configs, int argc, const char* const* argv,
                        const ParseOptions& options) {
  FlagParser parser(configs, options.known, options.refused_values);
  CommandLine line(parser, options, argc, argv);
  ParseResult result;
  if (!line.parse()) {
    result.help = true;
    result.help_topic = std::move(line.help_topic);
    return result;
  }
  // Consequences of a missing file would only hide the cause.
  if (!line.config_file.empty() && !parser.read_yaml_file(line.config_file, line.given, false))
    parser.violations.throw_if_any();
  assign_fields(configs, parser.values);
  for (const FieldInfo& field : parser.fields())
    if (parser.values.count(field.name) > 0) result.given.push_back(field.name);
  if (options.finalize) {
    try {
      options.finalize();
    } catch (const Error& error) {
      if (parser.violations.empty()) parser.violations.add(error.what());
    }
  }
  parser.judge_known(options.judge);
  result.already_so = std::move(parser.already_so);
  validate(configs, options, parser);
  parser.violations.throw_if_any();
  result.notes = std::move(line.notes);
  if (options.print_notes)
    for (const std::string& note : result.notes) log_info(note);
  return result;
}

void read_yaml(std::span<Config* const> configs, const std::string& path, bool ignore_unknown) {
  FlagParser parser(configs, {});
  parser.read_yaml_file(path, {}, ignore_unknown);
  parser.violations.throw_if_any();
  assign_fields(configs, parser.values);
}

std::vector<std::string> accepted_flags(std::span<Config* const> configs) {
  const FlagParser parser(configs, {});
  std::vector<std::string> flags;
  for (const auto& [flag, target] : parser.flags()) flags.push_back(flag);
  return flags;
}

std::string nearest(std::string_view word, std::span<const std::string> names) {
  // Up to a quarter of the word may differ; in short words two edits.
  size_t best = std::max<size_t>(2, word.size() / 4 + 1) + 1;
  best = std::min(best, word.size());
  std::string found;
  for (const std::string& name : names) {
    const size_t difference =
        name.size() > word.size() ? name.size() - word.size() : word.size() - name.size();
    if (difference >= best) continue;
    const size_t distance = edit_distance(word, name);
    if (distance < best) {
      best = distance;
      found = name;
    }
  }
  return found;
}

}  // namespace megatron
