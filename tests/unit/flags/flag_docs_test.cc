// Writes docs/flags.md from the configurations and the flag table, and compares.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/parse.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/arguments/flag_table.h"

namespace megatron {
namespace {

std::string type_name(const FieldInfo& field) {
  switch (field.kind) {
    case FieldKind::kBool:
      return "switch";
    case FieldKind::kInt:
      return "integer";
    case FieldKind::kDouble:
      return "number";
    case FieldKind::kString:
      return "text";
    case FieldKind::kOptionalInt:
      return "integer or none";
    case FieldKind::kOptionalDouble:
      return "number or none";
    case FieldKind::kIntList:
      return "integers";
    case FieldKind::kDoubleList:
      return "numbers";
    case FieldKind::kStringList:
      return "texts";
    case FieldKind::kChoice:
      break;
  }
  return listed(field.spellings);
}

// The default as help shows it; empty if there is none to show.
std::string shown_default(const FieldInfo& field) {
  if (field.kind == FieldKind::kBool)
    return std::get<bool>(field.value) == field.negative ? "" : "on";
  if (std::holds_alternative<std::monostate>(field.value)) return "";
  return format_value(field.value);
}

std::string markdown(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    if (c == '<')
      out += "&lt;";
    else
      out += c == '\n' ? ' ' : c;
  }
  return out;
}

std::string code_list(const std::vector<std::string>& flags) {
  std::string out;
  for (const std::string& flag : flags) out += (out.empty() ? "`" : " `") + flag + "`";
  return out;
}

// Rows "| `--flag` | type | default | help |" under a heading per group.
std::string to_markdown(std::span<Config* const> configs) {
  std::string out, group;
  bool first = true;
  for (const FieldInfo& field : describe_fields(configs)) {
    if (first || field.group != group) {
      out += cat(first ? "" : "\n", "### ", field.group.empty() ? "other" : field.group,
                 "\n\n| Flag | Value | Default | Meaning |\n|---|---|---|---|\n");
      group = field.group;
      first = false;
    }
    const std::string by_default = shown_default(field);
    out += cat("| ", code_list(field.flags), " | ", markdown(type_name(field)), " | ",
               by_default.empty() ? "" : "`" + markdown(by_default) + "`", " | ",
               markdown(field.help), " |\n");
  }
  return out;
}

// The flags that work, then those of the table that no config owns, by class. `condition`: the
// runs in which a flag of the table is accepted; empty: all.
std::string flags_document(std::span<Config* const> configs, std::span<const KnownFlag> known,
                           const std::function<std::string(const KnownFlag&)>& condition = {}) {
  const std::vector<std::string> accepted = accepted_flags(configs);
  const std::set<std::string> owned(accepted.begin(), accepted.end());
  std::string so, refused;
  size_t num_so = 0, num_refused = 0;
  for (const KnownFlag& entry : known) {
    std::vector<std::string> flags;
    for (size_t begin = 0; begin < entry.flag.size();) {
      const size_t end = std::min(entry.flag.find(' ', begin), entry.flag.size());
      if (std::string flag(entry.flag.substr(begin, end - begin)); owned.count(flag) == 0)
        flags.push_back(flag);
      begin = end + 1;
    }
    if (flags.empty()) continue;
    if (entry.kind == KnownFlag::Kind::kAlreadySo) {
      ++num_so;
      so += cat("| ", code_list(flags), " | ", markdown(entry.reason), " | ",
                condition ? markdown(condition(entry)) : "", " |\n");
    } else {
      ++num_refused;
      refused += cat("| ", code_list(flags), " | ", markdown(entry.reason), " | ",
                     entry.neutral.empty() ? "" : cat("`", entry.neutral, "`"), " |\n");
    }
  }
  std::string out =
      "# Flags\n\n"
      "Generated from the configuration structs and the flag table; do not edit.\n\n"
      "Every flag of Megatron-LM is known and is in one of three classes: it works, it is already "
      "so (accepted and listed\n"
      "once at start), or it is refused with the reason. A flag is `--flag value` or "
      "`--flag=value`; a switch may be followed\n"
      "by `true` or `false`, and `--no-x` is the opposite of `--x`; a list takes several values. "
      "The same names with\n"
      "underscores are the keys of a YAML file given with `--config`; the command line wins over "
      "the file.\n\n"
      "## Flags that work\n\n";
  out += to_markdown(configs);
  out += cat("\n## Already so\n\nAccepted, because they ask for what is done anyway (", num_so,
             " flags). Where the last column names runs, other runs\nrefuse the flag, for the "
             "reason after else:. What "
             "shows that a reason is true is named in the sources, and a test\nlooks at it.\n\n"
             "| Flag | Why | In which runs |\n|---|---|---|\n",
             so);
  out += cat("\n## Refused\n\n", num_refused,
             " flags. The values of the last column, `false` and `null` in a file, and `false` "
             "after a switch ask for nothing\n"
             "and are accepted.\n\n| Flag | Why | Accepted values |\n|---|---|---|\n",
             refused);
  return out;
}

// In which runs a flag is accepted, and why it is refused in others; empty: accepted in all.
std::string flag_condition(const KnownFlag& flag) {
  if (flag.claim == nullptr || flag.claim->holds == nullptr) return {};
  return cat(flag.claim->when, "; else: ", flag.claim->otherwise);
}

TEST(FlagDocs, AreCurrent) {
  Arguments arguments;
  const std::vector<Config*> configs = arguments.configs();
  const std::string expected = flags_document(configs, flag_table(), flag_condition);
  const std::string path = MEGATRON_SOURCE_DIR "/docs/flags.md";
  if (std::getenv("MEGATRON_UPDATE_DOCS") != nullptr) write_file_atomically(path, expected);
  const std::string actual = read_file(path);
  const auto [there, here] =
      std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  const auto line_at = [](const std::string& text, std::string::const_iterator at) {
    const size_t begin = text.rfind('\n', static_cast<size_t>(at - text.begin())) + 1;
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_TRUE(actual == expected)
      << "docs/flags.md is not current; `make docs` writes it anew\n  it says:   "
      << line_at(actual, there) << "\n  expected:  " << line_at(expected, here);
}

struct OneFlag : Config {
  double lr = 0.5;
  void fields(FieldVisitor& v) override {
    v.group("training");
    v.field({"lr", "--lr --learning-rate"}, lr, "learning rate");
  }
};

TEST(FlagDocs, AFlagOfTheTableThatAFieldOwnsIsTheFields) {
  OneFlag c;
  Config* const configs[] = {&c};
  constexpr KnownFlag known[] = {
      {"--lr", KnownFlag::Kind::kRefused, "not here", 1, 1},
      {"--num-experts", KnownFlag::Kind::kRefused, "not built", 1, 1, "0 none"}};
  const std::string document = flags_document(configs, known);
  EXPECT_THAT(document, testing::HasSubstr(
                            "| `--lr` `--learning-rate` | number | `0.5` | learning rate |\n"));
  EXPECT_THAT(document, testing::HasSubstr("| `--num-experts` | not built | `0 none` |\n"));
  EXPECT_THAT(document, testing::Not(testing::HasSubstr("not here")));
}

}  // namespace
}  // namespace megatron
