#include "source_tree.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

namespace megatron {
namespace fs = std::filesystem;

namespace {

// What builds and runs leave in the root of a checkout; .gitignore names them.
const std::set<std::string> kGenerated = {"build", "dist", "runs", "corpus"};

bool is_generated(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name == "__pycache__" || (name.starts_with('.') && name != ".ci") ||
         (folder.parent_path() == source_root() && kGenerated.contains(name));
}

void append_files(const fs::path& folder, std::vector<fs::path>& files) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory()) {
      if (!is_generated(entry.path())) append_files(entry.path(), files);
    } else if (!name.ends_with(".pyc")) {
      files.push_back(fs::relative(entry.path(), source_root()));
    }
  }
}

}  // namespace

fs::path source_root() {
  const char* const other = std::getenv("MEGATRON_LINT_ROOT");
  return other != nullptr ? other : MEGATRON_SOURCE_DIR;
}

std::vector<fs::path> list_files(const std::vector<std::string>& folders) {
  std::vector<fs::path> files;
  if (folders.empty()) append_files(source_root(), files);
  for (const std::string& folder : folders) {
    if (fs::exists(source_root() / folder)) append_files(source_root() / folder, files);
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool ends_with_any(std::string_view name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [&](const std::string& ending) { return name.ends_with(ending); });
}

std::vector<SourceFile> read_sources(const std::vector<std::string>& folders,
                                     const std::vector<std::string>& endings) {
  std::vector<SourceFile> sources;
  for (const fs::path& path : list_files(folders)) {
    if (!ends_with_any(path.string(), endings)) continue;
    sources.push_back({path.generic_string(), read_text(source_root() / path)});
  }
  return sources;
}

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) end = text.size();
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::string join(const std::vector<std::string>& violations) {
  std::string text;
  for (const std::string& violation : violations) text += "\n  " + violation;
  return text;
}

}  // namespace megatron
