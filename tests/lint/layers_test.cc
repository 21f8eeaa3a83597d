// Enforces the dependency rule: a file includes headers of its own folder and of folders with a
// strictly lower level. Also bounds what headers include, to keep compile times low
// (docs/architecture.md).
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <utility>

#include "source_tree.h"

namespace megatron {
namespace {

// Levels, of folders and of rooms in folders: within a folder the second number decides, where it
// has one; a folder without rooms, or a room that is not listed, may include all of itself.
struct Level {
  int folder = 0;
  int room = 0;
};
const std::map<std::string, Level> kLevels = {{"base", {0}},
                                              {"chat", {1}},
                                              {"kernels", {1}},
                                              {"media", {1}},
                                              {"reporting", {1}},
                                              {"tokenizers", {1}},
                                              {"datasets", {2}},
                                              {"scheduling", {2}},
                                              {"tensor", {2}},
                                              {"comm", {3}},
                                              {"serving/http", {3, 0}},
                                              {"serving", {3, 1}},
                                              {"serving/bench", {3, 2}},
                                              {"serving/client", {3, 2}},
                                              {"nn", {4}},
                                              {"dist_checkpointing", {5, 0}},
                                              {"dist_checkpointing/foreign", {5, 1}},
                                              {"tensor_parallel", {5}},
                                              {"pipeline_parallel", {5}},
                                              {"distributed", {5}},
                                              {"optimizer", {6}},
                                              {"runtime", {6}},
                                              {"transformer/config", {6, 0}},
                                              {"transformer/layer", {6, 1}},
                                              {"transformer/context_parallel", {6, 2}},
                                              {"transformer/attention", {6, 3}},
                                              {"transformer/feed_forward", {6, 3}},
                                              {"transformer/ssm", {6, 3}},
                                              {"transformer/moe", {6, 4}},
                                              {"transformer", {6, 5}},
                                              {"models", {7}},
                                              {"interop", {8}},
                                              {"training/arguments", {9, 0}},
                                              {"training/planning", {9, 1}},
                                              {"training", {9, 2}},
                                              {"training/tasks", {9, 3}},
                                              {"training/proving", {9, 4}},
                                              {"training/benchmarking", {9, 4}},
                                              {"inference", {9, 0}},
                                              {"inference/evaluation", {9, 1}}};

const std::set<std::string> kTorchFree = {
    "base",       "chat",     "kernels",    "media",
    "tokenizers", "datasets", "scheduling", "dist_checkpointing",
    "serving"};
const std::set<std::string> kMayAskForCuda = {"kernels", "tensor", "comm"};
constexpr int kMaxIncludesOfHeader = 12;

// {file, start of the rule's text}: a reason belongs to each.
const std::set<std::pair<std::string, std::string>> kExceptions = {
    // The one header that is made to be precompiled: it is what other headers must not include.
    {"megatron/tensor/torch.h", "header includes"},
    // All that is used of Asio, in the order that one version of it needs.
    {"megatron/serving/http/detail/asio.h", "many includes"},
};

// "megatron/nn/module.h" -> "nn"; "tools/main.cc" -> "".
std::string folder_of(const std::string& path) {
  if (!path.starts_with("megatron/")) return {};
  const size_t begin = std::string("megatron/").size();
  const size_t end = path.find('/', begin);
  return end == std::string::npos ? std::string() : path.substr(begin, end - begin);
}

// "megatron/training/tasks/dpo.h" -> "training/tasks"; where that has no level, its folder.
std::string room_of(const std::string& path) {
  const std::string folder = folder_of(path);
  if (folder.empty()) return {};
  const size_t begin = std::string("megatron/").size();
  const size_t end = path.find('/', begin + folder.size() + 1);
  const std::string room = end == std::string::npos ? folder : path.substr(begin, end - begin);
  return kLevels.contains(room) ? room : folder;
}

bool is_torch(const std::string& header) {
  return header.starts_with("torch/") || header.starts_with("ATen/") || header.starts_with("c10/");
}

class Checker {
 public:
  // Violations of one file, each "path:line: rule: what".
  std::vector<std::string> check(const SourceFile& file) {
    file_ = &file;
    violations_.clear();
    folder_ = folder_of(file.path);
    header_ = file.path.ends_with(".h") || file.path.ends_with(".cuh");
    static const std::regex kInclude(R"(^\s*#\s*include\s*[<"]([^>"]+)[>"])");
    static const std::regex kCudaCondition(R"(^\s*#\s*(if|ifdef|ifndef|elif).*\bMEGATRON_CUDA\b)");
    static const std::regex kUsing(R"(^\s*using\s+namespace\b)");
    int includes = 0;
    line_ = 0;
    for (const std::string& line : split_lines(file.text)) {
      ++line_;
      std::smatch match;
      if (std::regex_search(line, match, kInclude)) {
        // A header may put together the parts of its own room.
        if (room_of(file.path).empty() || room_of(match[1]) != room_of(file.path)) ++includes;
        check_include(match[1]);
      } else if (std::regex_search(line, kCudaCondition)) {
        if (!folder_.empty() && !kMayAskForCuda.contains(folder_)) {
          report("MEGATRON_CUDA", "a missing backend is a source file chosen by CMake");
        }
      } else if (header_ && std::regex_search(line, kUsing)) {
        report("using namespace", "in a header");
      }
    }
    if (header_ && includes > kMaxIncludesOfHeader) {
      report("many includes", std::to_string(includes) + " in a header; at most " +
                                  std::to_string(kMaxIncludesOfHeader));
    }
    return violations_;
  }

 private:
  void report(const std::string& rule, const std::string& what) {
    if (kExceptions.contains({file_->path, rule})) return;
    violations_.push_back(file_->path + ":" + std::to_string(line_) + ": " + rule + ": " + what);
  }

  void check_include(const std::string& header) {
    const std::string other = folder_of(header);
    if (is_torch(header)) check_torch(header);
    const std::string room = room_of(file_->path), other_room = room_of(header);
    if (!room.empty() && !other_room.empty() && room != other_room) {
      if (!kLevels.contains(other_room)) {
        report("unknown folder", header);
      } else if (kLevels.contains(room)) {
        const Level own = kLevels.at(room), its = kLevels.at(other_room);
        const int higher = other == folder_ ? its.room - own.room : its.folder - own.folder;
        if (higher >= 0) report(higher == 0 ? "sideways include" : "upward include", header);
      }
    }
    if (!other.empty() && header.find("/detail/") != std::string::npos && other != folder_ &&
        !file_->path.starts_with("tests/unit/" + other + "/") &&
        !file_->path.starts_with("tests/fuzz/")) {
      report("detail of another folder", header);
    }
  }

  void check_torch(const std::string& header) {
    if (kTorchFree.contains(folder_)) report("torch in a torch-free folder", header);
    if (file_->path.ends_with(".cu") || file_->path.ends_with(".cuh"))
      report("torch in CUDA source", header);
    // ATen/core/Tensor.h includes c10/core/ itself.
    if (header_ && !folder_.empty() && header != "ATen/core/Tensor.h" &&
        !header.starts_with("c10/core/")) {
      report("header includes", header);
    }
  }

  const SourceFile* file_ = nullptr;
  std::string folder_;
  bool header_ = false;
  int line_ = 0;
  std::vector<std::string> violations_;
};

TEST(Layers, TheTreeKeepsTheRule) {
  Checker checker;
  std::vector<std::string> violations;
  const auto sources = read_sources({"megatron", "tools", "tests", "benchmarks", "examples"},
                                    {".h", ".cc", ".cu", ".cuh"});
  ASSERT_GT(sources.size(), 20u);
  for (const SourceFile& file : sources) {
    // Strings of this file hold the very lines that are forbidden.
    if (file.path == "tests/lint/layers_test.cc") continue;
    for (std::string& violation : checker.check(file)) violations.push_back(std::move(violation));
  }
  EXPECT_TRUE(violations.empty()) << join(violations);
}

TEST(Layers, EveryFolderHasALevelAndTheBuildKnowsTheSameOnes) {
  std::smatch match;
  const std::string cmake = read_text(source_root() / "CMakeLists.txt");
  ASSERT_TRUE(std::regex_search(cmake, match, std::regex(R"(set\(MEGATRON_LAYERS([^)]*)\))")));
  std::map<std::string, int> levels;
  const std::string list = match[1];
  const std::regex entry(R"((\w+):(\d+))");
  for (auto it = std::sregex_iterator(list.begin(), list.end(), entry);
       it != std::sregex_iterator(); ++it) {
    levels[(*it)[1]] = std::stoi((*it)[2]);
  }
  std::map<std::string, int> own;
  for (const auto& [room, level] : kLevels) own[room.substr(0, room.find('/'))] = level.folder;
  EXPECT_EQ(levels, own);
  for (const auto& folder : std::filesystem::directory_iterator(source_root() / "megatron")) {
    if (!folder.is_directory() || std::filesystem::is_empty(folder)) continue;
    EXPECT_TRUE(own.contains(folder.path().filename().string()))
        << folder.path() << " has no level";
  }
}

// The rules themselves: each bad line is found, each good one is not.
TEST(Layers, RulesFindWhatTheyForbid) {
  const std::vector<std::tuple<std::string, std::string, std::string>> bad = {
      {"megatron/nn/x.cc", "#include \"megatron/models/gpt/gpt_model.h\"", "upward include"},
      {"megatron/training/x.cc", "#include \"megatron/inference/engine.h\"", "sideways include"},
      {"megatron/training/x.cc", "#include \"megatron/training/tasks/y.h\"", "upward include"},
      {"megatron/training/proving/x.cc", "#include \"megatron/training/benchmarking/y.h\"",
       "sideways include"},
      {"megatron/runtime/x.cc", "#include \"megatron/training/arguments/y.h\"", "upward include"},
      {"megatron/nn/x.cc", "#include \"megatron/comm/detail/ring.h\"", "detail of another folder"},
      {"tools/x.cc", "#include \"megatron/comm/detail/ring.h\"", "detail of another folder"},
      {"megatron/datasets/x.cc", "#include <ATen/ATen.h>", "torch in a torch-free folder"},
      {"megatron/tensor/x.cu", "#include <ATen/core/Tensor.h>", "torch in CUDA source"},
      {"megatron/nn/x.h", "#include <ATen/ATen.h>", "header includes"},
      {"megatron/nn/x.cc", "#if MEGATRON_CUDA", "MEGATRON_CUDA"},
      {"megatron/nn/x.h", "using namespace std;", "using namespace"},
      {"megatron/base/x.h",
       [] {
         std::string many;
         for (int i = 0; i < 13; ++i) many += "#include <h" + std::to_string(i) + ">\n";
         return many;
       }(),
       "many includes"}};
  Checker checker;
  for (const auto& [path, line, rule] : bad) {
    const auto violations = checker.check({path, line});
    ASSERT_EQ(violations.size(), 1u) << path << ": " << line;
    EXPECT_NE(violations[0].find(": " + rule + ": "), std::string::npos) << violations[0];
  }
  const std::vector<SourceFile> good = {
      {"megatron/nn/x.cc", "#include \"megatron/comm/process_group.h\""},
      {"megatron/nn/x.h", "#include <ATen/core/Tensor.h>"},
      {"megatron/tensor/x.cc", "#if MEGATRON_CUDA\n#include <ATen/ATen.h>"},
      {"megatron/comm/x.cc", "#include \"megatron/comm/detail/ring.h\""},
      {"megatron/training/tasks/x.cc", "#include \"megatron/training/task.h\""},
      {"megatron/interop/x.cc", "#include \"megatron/interop/huggingface/y.h\""},
      {"tests/unit/comm/x_test.cc", "#include \"megatron/comm/detail/ring.h\""},
      {"tools/x.cc", "#include \"megatron/training/arguments/arguments.h\"\nusing namespace std;"}};
  for (const SourceFile& file : good) EXPECT_TRUE(checker.check(file).empty()) << file.path;
}

}  // namespace
}  // namespace megatron
