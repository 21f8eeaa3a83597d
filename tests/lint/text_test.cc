// Rules for committed text: ASCII sources without tabs, no machine-specific paths, no large files.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>

#include "source_tree.h"

namespace megatron {
namespace {
namespace fs = std::filesystem;

constexpr uintmax_t kMaxFileBytes = 1 << 20;
constexpr uintmax_t kMaxTreeBytes = 24 << 20;  // nearly half of it goldens, of every model

const std::vector<std::string> kSources = {
    ".h",       ".cc",   ".cu",        ".cuh", ".cmake", ".py", ".sh", ".in", "CMakeLists.txt",
    "Makefile", ".yaml", ".clang-tidy"};
const std::vector<std::string> kText = {".md", ".flags", ".json"};

// Written in two parts, so that this file does not hold them.
const std::vector<std::string> kMachinePaths = {
    std::string("/wo") + "rk/", std::string("/op") + "t/ref", std::string("/ro") + "ot/",
    std::string("/ho") + "me/"};

std::vector<std::string> check_text(const SourceFile& file) {
  std::vector<std::string> violations;
  const bool source = ends_with_any(file.path, kSources);
  const bool makefile = file.path.ends_with("Makefile");
  int number = 0;
  for (const std::string& line : split_lines(file.text)) {
    const std::string place = file.path + ":" + std::to_string(++number) + ": ";
    for (const unsigned char c : line) {
      const char* what = c == '\r'                          ? "carriage return"
                         : c == '\t' && source && !makefile ? "tab"
                         : c >= 0x80 && source              ? "byte that is not ASCII"
                                                            : nullptr;
      if (what == nullptr) continue;
      violations.push_back(place + what);
      break;
    }
    if (source && line.ends_with(' ')) violations.push_back(place + "blank at the end");
    for (const std::string& path : kMachinePaths) {
      if (line.find(path) != std::string::npos)
        violations.push_back(place + "path of one machine: " + path);
    }
  }
  if (source && !file.text.empty() && !file.text.ends_with('\n'))
    violations.push_back(file.path + ": no line feed at the end");
  return violations;
}

// Lines of a C++ source that are longer than 100 columns; raw strings hold what they hold.
std::vector<std::string> check_columns(const SourceFile& file) {
  static const std::regex kRawBegin("R\"([^ ()\\\\]*)\\(");
  std::vector<std::string> violations;
  std::string raw_end;  // of the raw string that the line begins in; empty: none
  int number = 0;
  for (const std::string& line : split_lines(file.text)) {
    ++number;
    bool raw = !raw_end.empty();
    size_t at = 0;
    for (std::smatch begin;;) {
      if (!raw_end.empty()) {
        const size_t end = line.find(raw_end, at);
        if (end == std::string::npos) break;
        at = end + raw_end.size();
        raw_end.clear();
      }
      const std::string rest = line.substr(at);
      if (!std::regex_search(rest, begin, kRawBegin)) break;
      raw = true;
      raw_end = ")" + begin[1].str() + "\"";
      at += static_cast<size_t>(begin.position() + begin.length());
    }
    if (line.size() > 100 && !raw)
      violations.push_back(file.path + ":" + std::to_string(number) + ": longer than 100 columns");
  }
  return violations;
}

TEST(Text, LinesFitHundredColumns) {
  std::vector<std::string> violations;
  for (const SourceFile& file : read_sources({}, {".h", ".cc", ".cu", ".cuh"}))
    for (std::string& violation : check_columns(file)) violations.push_back(std::move(violation));
  EXPECT_TRUE(violations.empty()) << join(violations);
  const std::string wide(101, 'a');
  EXPECT_EQ(check_columns({"a.cc", "// " + wide + "\n"}).size(), 1u);
  const std::string begin = std::string("R") + "\"(";
  EXPECT_EQ(check_columns({"a.cc", "f(" + begin + wide + "\n" + wide + ")\");\n"}).size(), 0u);
  EXPECT_EQ(check_columns({"a.cc", "f(" + begin + "x)\");\n// " + wide + "\n"}).size(), 1u);
}

// Names of <algorithm>, which some standard libraries bring along with other headers and others do
// not.
bool lacks_algorithm(const SourceFile& file) {
  static const std::regex kUse(
      R"(\bstd::(ranges::)?(max|min|sort|stable_sort|nth_element|fill|copy|clamp|find|find_if|any_of|all_of|none_of|reverse|shuffle|equal|unique|lower_bound|upper_bound|transform|count|count_if|max_element|min_element|remove_if|rotate)\s*\()");
  return file.text.find("#include <algorithm>") == std::string::npos &&
         std::regex_search(file.text, kUse);
}

TEST(Text, AlgorithmsAreIncluded) {
  std::vector<std::string> violations;
  for (const SourceFile& file : read_sources({}, {".h", ".cc", ".cu", ".cuh"}))
    if (lacks_algorithm(file))
      violations.push_back(file.path + ": uses <algorithm> without including it");
  EXPECT_TRUE(violations.empty()) << join(violations);
  const std::string use = std::string("int a = std::m") + "ax(1, 2);\n";
  EXPECT_TRUE(lacks_algorithm({"a.cc", use}));
  EXPECT_FALSE(lacks_algorithm({"a.cc", "#include <algorithm>\n" + use}));
}

// Data of tests: outputs of other programs, texts in many languages, broken on purpose.
bool is_data(const std::string& path) {
  return path.starts_with("tests/golden/") || path.find("/corpus/") != std::string::npos ||
         path.find("/data/") != std::string::npos;
}

TEST(Text, SourcesAreAsciiWithoutTabs) {
  std::vector<std::string> endings = kSources;
  endings.insert(endings.end(), kText.begin(), kText.end());
  std::vector<std::string> violations;
  for (const SourceFile& file : read_sources({}, endings)) {
    if (is_data(file.path) && !ends_with_any(file.path, kSources)) continue;
    for (std::string& violation : check_text(file)) violations.push_back(std::move(violation));
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
}

TEST(Text, FilesAreSmall) {
  uintmax_t total = 0;
  for (const fs::path& path : list_files()) {
    if (fs::is_symlink(source_root() / path)) continue;
    const uintmax_t bytes = fs::file_size(source_root() / path);
    EXPECT_LE(bytes, kMaxFileBytes) << path;
    total += bytes;
  }
  EXPECT_LE(total, kMaxTreeBytes) << "the whole tree";
}

// Links of a document to files of the repository that are not there.
std::vector<std::string> broken_links(const SourceFile& document) {
  static const std::regex kLink(R"(\]\(([^)#\s]+)[^)]*\))");
  std::vector<std::string> broken;
  const std::string& text = document.text;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), kLink);
       it != std::sregex_iterator(); ++it) {
    const std::string link = (*it)[1];
    if (link.find("://") != std::string::npos) continue;
    if (!fs::exists(source_root() / fs::path(document.path).parent_path() / link)) {
      broken.push_back(document.path + ": no file for the link " + link);
    }
  }
  return broken;
}

TEST(Text, LinksOfDocumentsLead) {
  std::vector<std::string> violations;
  for (const SourceFile& document : read_sources({}, {".md"})) {
    for (std::string& violation : broken_links(document))
      violations.push_back(std::move(violation));
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
  EXPECT_EQ(
      broken_links({"docs/a.md", "[x](../README.md) [y](nowhere.md#z) [z](https://a.b)"}).size(),
      1u);
}

// "Suite.Name" of every test in C++, and the names of those in Python.
std::set<std::string> names_of_tests(const std::vector<SourceFile>& sources) {
  static const std::regex kTest(R"(^TEST(?:_P|_F)?\((\w+),\s*(\w+)\))"),
      kPython(R"(^\s+def (test_\w+))");
  std::set<std::string> names;
  for (const SourceFile& file : sources) {
    const std::vector<std::string> lines = split_lines(file.text);
    std::smatch match;
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string line =
          lines[i].starts_with("TEST") && i + 1 < lines.size() ? lines[i] + lines[i + 1] : lines[i];
      if (std::regex_search(line, match, kTest))
        names.insert({match[1].str() + ".", match[1].str() + "." + match[2].str()});
      else if (std::regex_search(line, match, kPython))
        names.insert(match[1]);
    }
  }
  return names;
}

// What a document names as a test, in backquotes, and no source has.
std::vector<std::string> unknown_tests(const SourceFile& document,
                                       const std::set<std::string>& names) {
  static const std::regex kName(R"(`(test_\w+|(\w+\.)[A-Z]\w+)`)");
  std::vector<std::string> unknown;
  for (std::sregex_iterator it(document.text.begin(), document.text.end(), kName), end; it != end;
       ++it) {
    const bool is_known_suite = (*it)[2].length() == 0 || names.contains((*it)[2]);
    if (is_known_suite && !names.contains((*it)[1]))
      unknown.push_back(document.path + ": there is no test " + (*it)[1].str());
  }
  return unknown;
}

TEST(Text, TestsThatDocumentsNameExist) {
  const auto names = names_of_tests(read_sources({"tests"}, {".cc", ".py"}));
  EXPECT_GT(names.size(), 1000u);
  std::vector<std::string> violations;
  for (const SourceFile& document : read_sources({"docs"}, {".md"})) {
    for (std::string& violation : unknown_tests(document, names))
      violations.push_back(std::move(violation));
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
  const auto known = names_of_tests({{"a.cc", "TEST_F(Suite,\n       Long) {\nTEST(Suite, Name) {"},
                                     {"b.py", "  def test_it(self):"}});
  EXPECT_EQ(
      unknown_tests({"a.md", "`Suite.Name` `Suite.Long` `test_it` `config.Name` `x.py`"}, known)
          .size(),
      0u);
  EXPECT_EQ(unknown_tests({"a.md", "`Suite.Other`, `test_other`"}, known).size(), 2u);
}

// Classes that two headers define in one namespace: a program that links both mixes their members.
std::vector<std::string> types_defined_twice(const std::vector<SourceFile>& headers) {
  static const std::regex kNamespace(R"(^namespace ([\w:]+))"),
      kType(R"(^(?:class|struct|union|enum class) (\w+)(?: final)?\s*(?::[^:;{][^;{]*)?\{)");
  std::map<std::string, std::string> first;
  std::vector<std::string> violations;
  for (const SourceFile& file : headers) {
    std::string scope;
    std::smatch match;
    for (const std::string& line : split_lines(file.text)) {
      if (std::regex_search(line, match, kNamespace)) scope = match[1];
      if (!std::regex_search(line, match, kType)) continue;
      const auto [known, is_new] = first.emplace(scope + "::" + match[1].str(), file.path);
      if (!is_new && known->second != file.path)
        violations.push_back(file.path + ": " + known->first + " is defined in " + known->second);
    }
  }
  return violations;
}

TEST(Text, TypesAreDefinedOnce) {
  const auto headers = read_sources({"megatron", "tools"}, {".h", ".cuh"});
  EXPECT_GT(headers.size(), 100u);
  const auto violations = types_defined_twice(headers);
  EXPECT_TRUE(violations.empty()) << join(violations);
  const auto of = [](const char* path, const char* line) {
    return SourceFile{path, std::string("namespace megatron {\n") + line + "\n"};
  };
  EXPECT_EQ(
      types_defined_twice({of("a.h", "class A {"), of("b.h", "struct A : public B {")}).size(), 1u);
  EXPECT_EQ(types_defined_twice({of("a.h", "class A {"), of("b.h", "class A;")}).size(), 0u);
}

TEST(Text, RulesFindWhatTheyForbid) {
  EXPECT_EQ(check_text({"a.cc", "int a;\n"}).size(), 0u);
  EXPECT_EQ(check_text({"a.cc", "\tint a;\n"}).size(), 1u);
  EXPECT_EQ(check_text({"a.cc", "int a;\r\n"}).size(), 1u);
  EXPECT_EQ(check_text({"a.cc", "int a; \n"}).size(), 1u);
  EXPECT_EQ(check_text({"a.cc", "int a;"}).size(), 1u);
  EXPECT_EQ(check_text({"a.cc", "// \xc3\xa9\n"}).size(), 1u);
  EXPECT_EQ(check_text({"a.md", "\xc3\xa9 in prose\n"}).size(), 0u);
  EXPECT_EQ(check_text({"Makefile", "a:\n\ttrue\n"}).size(), 0u);
  EXPECT_EQ(check_text({"a.md", "in " + kMachinePaths[0] + "x\n"}).size(), 1u);
}

}  // namespace
}  // namespace megatron
