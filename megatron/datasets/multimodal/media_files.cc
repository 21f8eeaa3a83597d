#include "megatron/datasets/multimodal/media_files.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {

namespace fs = std::filesystem;

fs::path media_root_of(const std::string& media_root, const fs::path& file) {
  const fs::path root = media_root.empty() ? file.parent_path() : fs::path(media_root);
  return root.empty() ? fs::path(".") : root;
}

FileRange file_below(const fs::path& root, const std::string& path, const std::string& where) {
  const fs::path given = path;
  std::error_code error;
  const fs::path folder = fs::canonical(root, error);
  MEGATRON_CHECK(!error, where, ": the folder of media ", root.string(),
                 " cannot be read: ", error.message(), "\nhint: name it with --media-root");
  const auto inside = [&](const fs::path& place) {
    return std::mismatch(folder.begin(), folder.end(), place.begin(), place.end()).first ==
           folder.end();
  };
  const fs::path spelled = (folder / given).lexically_normal();
  MEGATRON_CHECK(inside(spelled) && std::find(given.begin(), given.end(), "..") == given.end(),
                 where, ": the path ", path, " leaves the folder of media ", root.string());
  const fs::path file = fs::canonical(spelled, error);
  MEGATRON_CHECK(!error, where, ": there is no file ", spelled.string(),
                 "\nhint: paths are those below --media-root");
  MEGATRON_CHECK(inside(file), where, ": the path ", path, " leaves the folder of media ",
                 root.string(), " by a link, to ", file.string());
  MEGATRON_CHECK(fs::is_regular_file(file, error), where, ": ", file.string(), " is no file");
  const uint64_t size = fs::file_size(file, error);
  MEGATRON_CHECK(!error, where, ": ", file.string(), ": ", error.message());
  MEGATRON_CHECK(size > 0, where, ": ", file.string(), " has 0 bytes");
  return {file.string(), 0, size};
}

std::string read_range(const FileRange& range, const std::string& where) {
  const int fd = open_regular_file(range.path);
  std::string out(range.size, '\0');
  size_t done = 0;
  ssize_t got = 1;
  int reason = 0;
  while (done < out.size() && got > 0) {
    got =
        ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(range.offset + done));
    if (got < 0 && errno == EINTR) {
      got = 1;
      continue;
    }
    if (got < 0) reason = errno;
    if (got > 0) done += static_cast<size_t>(got);
  }
  ::close(fd);
  MEGATRON_CHECK(reason == 0, where, ": ", range.path, ": ", std::strerror(reason));
  MEGATRON_CHECK(done == out.size(), where, ": ", range.path, " ends at byte ", range.offset + done,
                 ", the medium at byte ", range.offset + range.size,
                 "\nhint: the file has changed since it was indexed");
  return out;
}

}  // namespace megatron
