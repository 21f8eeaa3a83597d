// CMake lists sources by name; a file that nobody lists would be built by nobody and missed by
// nobody.
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "source_tree.h"

namespace megatron {
namespace {
namespace fs = std::filesystem;

// The words of a CMake file, without comments.
std::set<std::string> cmake_words(const fs::path& path) {
  std::set<std::string> words;
  const std::string text = std::regex_replace(read_text(path), std::regex("#[^\n]*"), "");
  const std::regex word(R"re([^\s()";<>:]+)re");
  for (auto it = std::sregex_iterator(text.begin(), text.end(), word); it != std::sregex_iterator();
       ++it) {
    words.insert(it->str());
  }
  return words;
}

// Whether a CMakeLists.txt of the file's folder or of one above names it.
bool is_listed(const fs::path& file) {
  for (fs::path folder = file.parent_path();; folder = folder.parent_path()) {
    const fs::path list = source_root() / folder / "CMakeLists.txt";
    if (fs::exists(list) &&
        cmake_words(list).contains(
            fs::relative(source_root() / file, source_root() / folder).generic_string())) {
      return true;
    }
    if (folder.empty()) return false;
  }
}

TEST(SourceLists, EverySourceIsListed) {
  std::vector<std::string> violations;
  for (const fs::path& file :
       list_files({"megatron", "tools", "tests", "benchmarks", "examples"})) {
    if (!ends_with_any(file.string(), {".cc", ".cu"})) continue;
    if (!is_listed(file))
      violations.push_back(file.generic_string() + " is named in no CMakeLists.txt");
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
}

TEST(SourceLists, AFileThatNobodyListsIsFound) {
  EXPECT_TRUE(is_listed("tests/lint/source_lists_test.cc"));
  EXPECT_FALSE(is_listed("tests/lint/nobody_lists_this_test.cc"));
}

}  // namespace
}  // namespace megatron
