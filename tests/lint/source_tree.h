// The files of the repository, as text, without folders that a build or a run creates.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

struct SourceFile {
  std::string path;  // relative to the root, with forward slashes
  std::string text;
};

// Every file below `folders` (the whole repository when empty), sorted by path.
std::vector<std::filesystem::path> list_files(const std::vector<std::string>& folders = {});

// The files whose names end in one of `endings`, with their text.
std::vector<SourceFile> read_sources(const std::vector<std::string>& folders,
                                     const std::vector<std::string>& endings);

std::string read_text(const std::filesystem::path& path);
std::filesystem::path source_root();
bool ends_with_any(std::string_view name, const std::vector<std::string>& endings);

// Lines without their line feeds.
std::vector<std::string> split_lines(std::string_view text);

// One violation per line, for the message of a failed expectation.
std::string join(const std::vector<std::string>& violations);

}  // namespace megatron
