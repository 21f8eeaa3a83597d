// docs/flags.md equals what is generated from the configurations and the flag table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

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

}  // namespace
}  // namespace megatron
