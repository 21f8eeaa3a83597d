#include "megatron/base/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

namespace {

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
  if (path_.has_parent_path()) {
    std::error_code error;
    std::filesystem::create_directories(path_.parent_path(), error);
    MEGATRON_CHECK(!error, path_.parent_path().string(), " cannot be created: ", error.message());
  }
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  MEGATRON_CHECK(fd_ >= 0, path_.string(), " cannot be written: ", reason(errno));
  struct stat status{};
  if (::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode)) return;
  ::close(fd_);
  throw Error(cat(path_.string(), " is no regular file"));
}

AppendFile::~AppendFile() {
  if (fd_ >= 0) ::close(fd_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

uint64_t AppendFile::size() const {
  struct stat status{};
  MEGATRON_CHECK(::fstat(fd_, &status) == 0, path_.string(), " cannot be read: ", reason(errno));
  return static_cast<uint64_t>(status.st_size);
}

void AppendFile::append(std::string_view bytes) {
  struct stat status{};
  MEGATRON_CHECK(::fstat(fd_, &status) == 0, path_.string(), " cannot be written: ", reason(errno));
  MEGATRON_CHECK(status.st_nlink > 0, path_.string(), " was deleted");
  while (!bytes.empty()) {
    const ssize_t done = ::write(fd_, bytes.data(), bytes.size());
    if (done >= 0) {
      bytes.remove_prefix(static_cast<size_t>(done));
      continue;
    }
    if (errno == EINTR) continue;
    const int error = errno;
    if (::ftruncate(fd_, status.st_size) != 0) {
      // Then the file ends in a partial record, which readers of the formats skip.
    }
    throw Error(cat(path_.string(), " cannot be written: ", reason(error)));
  }
}

}  // namespace megatron
