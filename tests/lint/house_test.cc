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

// The path of a file once for each time that its code has this.
std::vector<std::string> uses_of(const std::regex& what, const std::vector<std::string>& folders) {
  std::vector<std::string> found;
  for (const SourceFile& file : read_sources(folders, kCpp))
    for (int i = count(code_of(file.text), what); i > 0; --i) found.push_back(file.path);
  return found;
}

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
    // A model that reads images contains one.
    if (file.path.starts_with("megatron/models/gpt/") ||
        file.path.starts_with("megatron/models/mimo/"))
      continue;
    if (count(code_of(file.text), kGpt) > 0) found.push_back(file.path);
  }
  expect_at_most("files outside models/gpt/ and models/mimo/ that name GPTModel",
                 static_cast<long>(found.size()), 0);
  EXPECT_TRUE(found.empty()) << join(found);
}

TEST(House, CommandsThatDoNotTrainDoNotIncludeTraining) {
  // retro finds neighbours of the samples that a run takes
  static const std::set<std::string> kTrain = {"bench",    "check", "finetune",
                                               "pretrain", "prove", "retro"};
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

// Names of the fields of the transformer's configuration, as its lists of fields spell them.
std::set<std::string> transformer_fields() {
  static const std::regex kField(R"re((?:field|choice)\(\{?"(\w+)")re");
  std::set<std::string> names;
  for (const SourceFile& file : read_sources({"megatron/transformer/config"}, {".cc"}))
    for (std::sregex_iterator i(file.text.begin(), file.text.end(), kField), end; i != end; ++i)
      names.insert((*i)[1]);
  return names;
}

// The loop, the plans and the proof know models by their interface.
TEST(House, TrainingReadsFewFieldsOfTheTransformer) {
  static const std::regex kRead(R"((?:\.|->)(\w+)\b(?!\())");
  std::set<std::string> names = transformer_fields();
  ASSERT_GT(names.size(), 60u);
  names.erase("seed");  // requests for data have one, too
  long reads = 0;
  for (const SourceFile& file : read_sources({"megatron/training"}, kCpp)) {
    if (file.path.starts_with("megatron/training/arguments/")) continue;
    const std::string code = code_of(file.text);
    for (std::sregex_iterator i(code.begin(), code.end(), kRead), end; i != end; ++i)
      reads += names.contains((*i)[1]) ? 1 : 0;
  }
  expect_at_most("reads of transformer fields in training/, outside arguments/", reads, 49);
}

// A configuration is put together of topics (docs/design/configuration.md).
TEST(House, TopicsAreSmall) {
  static const std::regex kField(R"re(\b(?:v|visitor)\.(?:field|choice)\()re");
  long most = 0;
  std::string where;
  for (const SourceFile& file : read_sources({"megatron", "tools"}, {".cc"})) {
    if (file.text.find("fields(FieldVisitor&") == std::string::npos) continue;
    const long fields = count(code_of(file.text), kField);
    if (fields <= most) continue;
    most = fields;
    where = file.path;
  }
  expect_at_most(("fields of the largest configuration, " + where).c_str(), most, 30);
}

struct Function {
  std::string place;  // file and first line
  long lines = 0;
};

// The functions of a file, and those of its classes, by the format of the tree: from the first line
// of the declaration to the brace that closes it at the same indentation.
std::vector<Function> functions_of(const SourceFile& file) {
  static const std::regex kClass(R"(^(template\s*<.*>\s*)?(class|struct)\b[^()=]*\{$)");
  static const std::regex kOther(R"(^\s*(namespace|enum|union|extern|private:|public:)\b|=|\]\()");
  std::vector<Function> functions;
  const std::vector<std::string> lines = split_lines(code_of(file.text));
  size_t indent = 0;  // 2 within a class
  std::string head;   // the declaration so far
  size_t first = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    const size_t begin = line.find_first_not_of(' ');
    if (begin == std::string::npos || line[begin] == '#' || line[begin] == '}') {
      if (begin == 0) indent = 0;
      head.clear();
      continue;
    }
    if (head.empty() && begin != indent) continue;
    if (head.empty()) first = i;
    head += line;
    if (line.ends_with("{")) {
      if (indent == 0 && std::regex_search(head, kClass)) {
        indent = 2;
      } else if (head.find('(') != std::string::npos && !std::regex_search(head, kOther)) {
        const std::string end = std::string(indent, ' ') + "}";
        while (i + 1 < lines.size() && !lines[i].starts_with(end)) ++i;
        functions.push_back({file.path + ":" + std::to_string(first + 1) + ": " + lines[first],
                             static_cast<long>(i - first + 1)});
      }
      head.clear();
    } else if (line.ends_with(";") || line.ends_with("}") || line.ends_with(":")) {
      head.clear();
    }
  }
  return functions;
}

// Functions whose length is that of a list of alike entries, or of a kernel's stages.
const std::vector<std::string> kLists = {
    "chat/detail/jinja_library.cc",  // the filters, methods and tests of the language
    "foreign/pickle.cc",             // one switch over the opcodes
    "families()",                    // of Hugging Face: one row each
    "kernels/",
};

TEST(House, FunctionsAreShort) {
  std::vector<Function> functions;
  Function lists;  // the longest list or check of fields
  for (const SourceFile& file : read_sources({"megatron", "tools"}, kCpp))
    for (const Function& function : functions_of(file)) {
      static const std::regex kOfFields(R"(Config::(\w*_)?(fields|validate)\()");
      if (std::regex_search(function.place, kOfFields) && function.lines > lists.lines)
        lists = function;
      if (function.lines <= 80 ||
          std::none_of(kLists.begin(), kLists.end(), [&](const std::string& list) {
            return function.place.find(list) != std::string::npos;
          }))
        functions.push_back(function);
    }
  std::sort(functions.begin(), functions.end(),
            [](const Function& a, const Function& b) { return a.lines > b.lines; });
  ASSERT_GT(functions.size(), 2000u);
  expect_at_most(("longest function, " + functions[0].place).c_str(), functions[0].lines, 80);
  expect_at_most(("longest fields() or validate(), " + lists.place).c_str(), lists.lines, 60);
  expect_at_most("99th percentile of the lengths of functions",
                 functions[functions.size() / 100].lines, 55);
}

// Deadlines and durations come from scheduling/clock.h: a wall clock that is set changes none.
TEST(House, ServingReadsTheWallClockForDatesAlone) {
  static const std::regex kWall(
      R"(\bsystem_clock\b|\btime\((nullptr|NULL|0)\)|\bgettimeofday\b|CLOCK_REALTIME)");
  const std::vector<std::string> found =
      uses_of(kWall, {"megatron/scheduling", "megatron/serving", "megatron/inference"});
  // Of `created`, of the header Date, and of a template's strftime_now.
  EXPECT_EQ(found, (std::vector<std::string>{
                       "megatron/inference/model_service.cc", "megatron/serving/chat_request.cc",
                       "megatron/serving/generation.cc", "megatron/serving/http/http_server.cc"}));
}

// ATen's template runs on the calling thread alone in sources that are compiled without OpenMP, all
// but one: the others call parallel_tasks() (tensor/threads.h).
TEST(House, OneSourceCallsParallelForOfATen) {
  static const std::regex kCall(R"(\bat::parallel_for\b)");
  EXPECT_EQ(uses_of(kCall, {"megatron", "tools"}),
            std::vector<std::string>{"megatron/tensor/parallel_rows.cc"});
}

TEST(House, DocumentsAreShort) {
  const std::string index = read_text(source_root() / "docs/performance.md");
  expect_at_most("lines of docs/performance.md", static_cast<long>(split_lines(index).size()), 120);
}

}  // namespace
}  // namespace megatron
