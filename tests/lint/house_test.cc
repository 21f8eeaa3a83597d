// The numbers that show whether the tree keeps its shape: each is printed and has a limit. A limit
// that is in the way means that the design changes: say so in docs/design/ first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "source_tree.h"

namespace megatron {
namespace {
namespace fs = std::filesystem;

// Without comments and without what strings hold.
std::string code_of(const std::string& text) {
  static const std::regex kString("\"(\\\\.|[^\"\\\\\n])*\"");
  std::string out;
  for (const std::string& line : split_lines(text)) {
    std::string code = std::regex_replace(line, kString, "\"\"");
    if (const size_t comment = code.find("//"); comment != std::string::npos) code.resize(comment);
    out += code + "\n";
  }
  return out;
}

int count(const std::string& text, const std::regex& what) {
  return static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), what), std::sregex_iterator()));
}

void expect_at_most(const char* what, long value, long limit) {
  std::printf("  %-72s %6ld (at most %ld)\n", what, value, limit);
  EXPECT_LE(value, limit) << what;
}

const std::vector<std::string> kCpp = {".h", ".cc", ".cu", ".cuh"};

TEST(House, RoomsAreSmall) {
  std::map<std::string, int> files;
  for (const SourceFile& file : read_sources({"megatron", "tools"}, kCpp))
    ++files[fs::path(file.path).parent_path().generic_string()];
  const auto largest = std::max_element(
      files.begin(), files.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  expect_at_most(("sources of the largest folder, " + largest->first).c_str(), largest->second, 40);
}

TEST(House, NobodyNamesTheGpt) {
  static const std::regex kGpt(R"(\bGPTModel\b)");
  std::vector<std::string> found;
  for (const SourceFile& file : read_sources({"megatron", "tools"}, kCpp)) {
    // Its own folder, and its row of the table.
    if (file.path.starts_with("megatron/models/gpt/") ||
        file.path == "megatron/models/model_table.cc")
      continue;
    if (count(code_of(file.text), kGpt) > 0) found.push_back(file.path);
  }
  expect_at_most("files outside models/gpt/ that name GPTModel", static_cast<long>(found.size()),
                 0);
  EXPECT_TRUE(found.empty()) << join(found);
}

TEST(House, CommandsThatDoNotTrainDoNotIncludeTraining) {
  static const std::set<std::string> kTrain = {"bench", "check", "finetune", "pretrain", "prove"};
  static const std::regex kInclude(R"(#include "megatron/training/)");
  std::vector<std::string> found;
  for (const SourceFile& file : read_sources({"tools/commands"}, kCpp))
    if (!kTrain.contains(fs::path(file.path).stem().string()) &&
        std::regex_search(file.text, kInclude))
      found.push_back(file.path);
  expect_at_most("commands that do not train and include training/",
                 static_cast<long>(found.size()), 0);
  EXPECT_TRUE(found.empty()) << join(found);
}

// Who decides over which ranks a gradient is summed, which copy is stored and which counts.
TEST(House, ReductionsAreDerivedInOneFile) {
  static const std::regex kAsks(R"((==|!=|contains\()\s*Axis::kTensor\b|\bdp_cp\.(rank|size)\()");
  std::vector<std::string> found;
  for (const SourceFile& file :
       read_sources({"megatron/distributed", "megatron/optimizer", "megatron/dist_checkpointing",
                     "megatron/nn", "megatron/training/planning"},
                    kCpp))
    if (count(code_of(file.text), kAsks) > 0) found.push_back(file.path);
  expect_at_most("files that ask for an axis to decide a reduction, a copy or a norm",
                 static_cast<long>(found.size()), 1);
  EXPECT_LE(found.size(), 1u) << join(found);
}

TEST(House, DocumentsAreShort) {
  const std::string index = read_text(source_root() / "docs/performance.md");
  expect_at_most("lines of docs/performance.md", static_cast<long>(split_lines(index).size()), 120);
}

}  // namespace
}  // namespace megatron
