// CMake lists sources by name; an unlisted file would silently not be built.
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

// Every path that a CMakeLists.txt of the tree could mean, relative to the root.
std::set<std::string> listed_paths() {
  static const std::string kRoot = "${PROJECT_SOURCE_DIR}/";
  std::set<std::string> paths;
  for (const fs::path& list : list_files()) {
    if (list.filename() != "CMakeLists.txt") continue;
    for (const std::string& word : cmake_words(source_root() / list)) {
      const fs::path path =
          word.starts_with(kRoot) ? fs::path(word.substr(kRoot.size())) : list.parent_path() / word;
      paths.insert(path.lexically_normal().generic_string());
    }
  }
  return paths;
}

TEST(SourceLists, EverySourceIsListed) {
  const std::set<std::string> listed = listed_paths();
  std::vector<std::string> violations;
  for (const fs::path& file :
       list_files({"megatron", "tools", "tests", "benchmarks", "examples"})) {
    if (!ends_with_any(file.string(), {".cc", ".cu"})) continue;
    if (!listed.contains(file.generic_string()))
      violations.push_back(file.generic_string() + " is named in no CMakeLists.txt");
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
}

TEST(SourceLists, AFileThatNobodyListsIsFound) {
  const std::set<std::string> listed = listed_paths();
  EXPECT_TRUE(listed.contains("tests/lint/source_lists_test.cc"));
  EXPECT_FALSE(listed.contains("tests/lint/nobody_lists_this_test.cc"));
}

}  // namespace
}  // namespace megatron
