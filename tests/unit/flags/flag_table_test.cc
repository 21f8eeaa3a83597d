#include "megatron/training/arguments/flag_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {
namespace {

using testing::HasSubstr;

struct Option {
  int min_values, max_values;
  std::vector<std::string> spellings;
};

std::vector<Option> options_of(const char* name) {
  std::ifstream file(std::string(MEGATRON_SOURCE_DIR "/tests/golden/flags/") + name);
  std::vector<Option> options;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    Option option;
    words >> option.min_values >> option.max_values;
    for (std::string word; words >> word;) option.spellings.push_back(word);
    options.push_back(option);
  }
  return options;
}

std::vector<std::string> spellings(const KnownFlag& flag) {
  std::istringstream words{std::string(flag.flag)};
  std::vector<std::string> out;
  for (std::string word; words >> word;) out.push_back(word);
  return out;
}

// Spellings of our flags, and whether they take values.
std::map<std::string, bool> field_flags() {
  Arguments arguments;
  std::map<std::string, bool> flags;
  for (Config* config : arguments.configs()) {
    Config* const configs[] = {config};
    for (const FieldInfo& field : describe_fields(configs))
      for (const std::string& flag : field.flags) flags[flag] = field.kind != FieldKind::kBool;
    for (const std::string& flag : accepted_flags(configs)) flags.emplace(flag, false);
  }
  return flags;
}

TEST(FlagTable, EveryOptionOfMegatronIsARowOfItsArityOrAField) {
  const std::map<std::string, bool> fields = field_flags();
  std::map<std::string, const KnownFlag*> table;
  for (const KnownFlag& flag : flag_table())
    for (const std::string& spelling : spellings(flag))
      EXPECT_TRUE(table.emplace(spelling, &flag).second) << spelling;
  std::vector<Option> options = options_of("megatron_flags.txt");
  EXPECT_EQ(options.size(), 838u);
  std::ranges::move(options_of("multimodal_flags.txt"), std::back_inserter(options));
  size_t owned = 0;
  for (const Option& option : options) {
    for (const std::string& spelling : option.spellings) {
      const auto row = table.find(spelling);
      const auto field = fields.find(spelling);
      if (row != table.end()) {
        EXPECT_EQ(row->second->min_values, option.min_values) << spelling;
        EXPECT_EQ(row->second->max_values, option.max_values) << spelling;
        table.erase(row);
      } else {
        ASSERT_NE(field, fields.end()) << spelling << " has neither a row nor a field";
      }
      if (field == fields.end()) continue;
      EXPECT_EQ(field->second, option.max_values != 0) << spelling;
      ++owned;
    }
  }
  EXPECT_GE(owned, 240u);
  EXPECT_THAT(table, testing::IsEmpty()) << "the table holds flags that Megatron does not have";
}

TEST(FlagTable, EveryRowSaysWhy) {
  for (const KnownFlag& flag : flag_table()) {
    EXPECT_GE(flag.reason.size(), 10u) << flag.flag;
    EXPECT_NE(flag.reason.back(), '.') << flag.flag;
    EXPECT_TRUE(flag.neutral.empty() || flag.max_values != 0) << flag.flag;
    EXPECT_EQ(flag.claim != nullptr, flag.kind == KnownFlag::Kind::kAlreadySo) << flag.flag;
  }
}

std::string refusal(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "command");
  ParseOptions options;
  options.known = flag_table();
  try {
    parse_flags({}, static_cast<int>(arguments.size()), arguments.data(), options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// Every row, alone: an already-so flag is accepted, a refused one gives its reason, its neutral
// values are accepted.
TEST(FlagTable, EveryRowDoesWhatItSays) {
  for (const KnownFlag& flag : flag_table()) {
    for (const std::string& spelling : spellings(flag)) {
      const std::string value(flag.kind == KnownFlag::Kind::kAlreadySo && !flag.neutral.empty()
                                  ? flag.neutral.substr(0, flag.neutral.find(' '))
                                  : "unheard-of");
      std::vector<const char*> arguments(1 + static_cast<size_t>(flag.min_values), value.c_str());
      arguments[0] = spelling.c_str();
      const std::string message = refusal(arguments);
      if (flag.kind == KnownFlag::Kind::kAlreadySo) {
        EXPECT_EQ(message, "accepted") << spelling;
      } else {
        EXPECT_THAT(message, HasSubstr(cat(spelling, " is refused: ", flag.reason)));
      }
      std::istringstream neutral{std::string(flag.neutral)};
      for (std::string value; neutral >> value;)
        EXPECT_EQ(refusal({spelling.c_str(), value.c_str()}), "accepted")
            << spelling << " " << value;
    }
  }
}

TEST(FlagTable, LaunchScriptsForOneRankPass) {
  EXPECT_EQ(refusal({"--moe-hybridep-num-sms-preprocessing", "108", "--transformer-impl",
                     "transformer_engine", "--use-flash-attn", "--no-masked-softmax-fusion",
                     "--no-gradient-accumulation-fusion", "--attention-softmax-in-fp32",
                     "--accumulate-allreduce-grads-in-fp32", "--manual-gc", "--manual-gc-interval",
                     "10", "--deterministic-mode", "--use-mcore-models", "--no-save-rng"}),
            "accepted");
  EXPECT_THAT(refusal({"--moe-paged-stash"}), HasSubstr("by computing in rounds"));
}

}  // namespace
}  // namespace megatron
