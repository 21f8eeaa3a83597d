// docs/flags.md equals what is generated from the configurations and the flag table, and every flag
// of Megatron is in one of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/arguments/flag_table.h"

namespace megatron {
namespace {

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

TEST(FlagDocs, RowsThatAFieldShouldOwnAreOwned) {
  Arguments arguments;
  const std::vector<Config*> configs = arguments.configs();
  const std::vector<std::string> accepted = accepted_flags(configs);
  const std::set<std::string> owned(accepted.begin(), accepted.end());
  for (const KnownFlag& flag : flag_table()) {
    if (flag.reason != kOwnedByField) continue;
    std::istringstream spellings{std::string(flag.flag)};
    for (std::string spelling; spellings >> spelling;)
      EXPECT_EQ(owned.count(spelling), 1u)
          << spelling << " has no field; give it a reason in the flag table";
  }
}

}  // namespace
}  // namespace megatron
