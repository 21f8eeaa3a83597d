// Where the bytes of media lie: in files below a folder, in members of archives, or in a file of
// bytes that rows held themselves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace megatron {

// Bytes [offset, offset + size) of a file.
struct FileRange {
  std::string path;
  uint64_t offset = 0;
  uint64_t size = 0;
};

// The folder of the media that rows of `file` name: `media_root`, or if that is empty the file's.
std::filesystem::path media_root_of(const std::string& media_root,
                                    const std::filesystem::path& file);

// The file of a row's path below `root`, which exists: as it is spelled, without links that leave
// `root`. Throws Error whose message starts with `where`: a path that leaves `root` ("..", a link,
// an absolute path elsewhere), no file there, none of bytes.
FileRange file_below(const std::filesystem::path& root, const std::string& path,
                     const std::string& where);

// The bytes of a range. Throws Error, if the file has become shorter.
std::string read_range(const FileRange& range, const std::string& where);

}  // namespace megatron
