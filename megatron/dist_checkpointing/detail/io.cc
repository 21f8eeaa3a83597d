#include "megatron/dist_checkpointing/detail/io.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/dist_checkpointing/access_error.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

IoHook& hook() {
  static IoHook instance;
  return instance;
}
std::atomic<bool> hook_is_set{false};

int ask_hook(IoOp op, const fs::path& path, const fs::path& to = {}) {
  return hook_is_set.load(std::memory_order_acquire) ? hook()(op, path, to) : 0;
}

// Fails as requested by the hook.
void pass_hook(IoOp op, const char* what, const fs::path& path, const fs::path& to = {}) {
  const int error = ask_hook(op, path, to);
  if (error > 0 && error != EINTR) throw_io_error(what, path, error);
}

constexpr size_t kMaxTransfer = size_t{1} << 30;

}  // namespace

void set_io_hook(IoHook new_hook) {
  hook_is_set.store(false, std::memory_order_release);
  hook() = std::move(new_hook);
  hook_is_set.store(static_cast<bool>(hook()), std::memory_order_release);
}

void throw_io_error(const std::string& what, const fs::path& path, int error) {
  std::string message =
      cat("cannot ", what, " ", path.string(), ": ", std::strerror(error), " (errno ", error, ")");
  if (error == ENOSPC || error == EDQUOT)
    message += "\nhint: free space there, keep fewer checkpoints, or save to another folder";
  if (error == EFBIG)
    message += "\nhint: the limit on file sizes (ulimit -f) is too low for this checkpoint";
  const bool reads = what == "open" || what == "read" || what == "read folder" || what == "look at";
  if (error == EACCES || error == EPERM || error == EROFS)
    message += reads ? "\nhint: the checkpoints and their folder must be readable by this user"
                     : "\nhint: the folder must be writable by this user";
  if (error == EMFILE || error == ENFILE)
    message += "\nhint: raise the limit on open files (ulimit -n)";
  if (error == EIO)
    message += "\nhint: the disk or the file server fails; see the kernel's log (dmesg)";
  if (error == ESTALE) message += "\nhint: the file server has replaced the folder; mount it again";
  if (is_damage(error)) throw Error(message);
  throw_access_error(message, is_temporary(error));
}

namespace {

template <class Base>
class AccessErrorOf final : public Base, public AccessError {
 public:
  using Base::Base;
  const char* what() const noexcept override { return Base::what(); }
};

}  // namespace

void throw_access_error(const std::string& message, bool may_retry) {
  if (may_retry) throw AccessErrorOf<RetryError>(message);
  throw AccessErrorOf<Error>(message);
}

bool is_damage(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO:  // a socket, or a device without a driver
      return true;
    default:
      return false;
  }
}

OutputFile::OutputFile(fs::path path, uint64_t expected_bytes) : path_(std::move(path)) {
  pass_hook(IoOp::kOpen, "create", path_);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) throw_io_error("create", path_, errno);
  if (expected_bytes == 0) return;
  int error = ask_hook(IoOp::kAllocate, path_);
  if (error == 0 && ::fallocate(fd_, 0, 0, static_cast<off_t>(expected_bytes)) != 0) error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO) {
    ::close(fd_);
    fd_ = -1;
    throw_io_error(cat("reserve ", expected_bytes, " bytes for"), path_, error);
  }
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void OutputFile::write(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    size_t part = std::min(bytes, kMaxTransfer);
    const int fault = ask_hook(IoOp::kWrite, path_);
    if (fault == kIoShort) part = std::max<size_t>(1, part / 2);
    const ssize_t written = fault > 0 ? -1 : ::write(fd_, at, part);
    if (fault > 0) errno = fault;
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_io_error("write", path_, errno);
    if (written == 0) throw_io_error("write", path_, EIO);
    at += written;
    bytes -= static_cast<size_t>(written);
    written_ += static_cast<uint64_t>(written);
  }
}

void OutputFile::write_back() {
  // On file systems without support the sync at the end does the work.
  if (begun_ > done_)
    (void)::sync_file_range(
        fd_, static_cast<off_t>(done_), static_cast<off_t>(begun_ - done_),
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  done_ = begun_;
  if (written_ > begun_)
    (void)::sync_file_range(fd_, static_cast<off_t>(begun_), static_cast<off_t>(written_ - begun_),
                            SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void OutputFile::sync_and_close() {
  pass_hook(IoOp::kSync, "write", path_);
  if (::fsync(fd_) != 0) throw_io_error("write", path_, errno);
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0 && errno != EINTR) throw_io_error("write", path_, errno);
}

InputFile::InputFile(fs::path path) : path_(std::move(path)) {
  pass_hook(IoOp::kRead, "open", path_);
  // Does not block on a FIFO
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd_ < 0) throw_io_error("open", path_, errno);
  struct stat info;
  const int error = ::fstat(fd_, &info) == 0 ? 0 : errno;
  if (error != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd_);
    fd_ = -1;
    if (error != 0) throw_io_error("look at", path_, error);
    throw Error(cat(path_.string(), ": is not a regular file"));
  }
  size_ = static_cast<uint64_t>(info.st_size);
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void InputFile::read_at(uint64_t offset, void* out, size_t bytes) const {
  char* at = static_cast<char*>(out);
  while (bytes > 0) {
    size_t part = std::min(bytes, kMaxTransfer);
    const int fault = ask_hook(IoOp::kRead, path_);
    if (fault == kIoShort) part = std::max<size_t>(1, part / 2);
    const ssize_t got = fault > 0 ? -1 : ::pread(fd_, at, part, static_cast<off_t>(offset));
    if (fault > 0) errno = fault;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_io_error("read", path_, errno);
    MEGATRON_CHECK(got > 0, path_.string(), ": ends at byte ", offset, ", ", bytes,
                   " more were expected");
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

void InputFile::forget_cached_pages() const { ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }

bool path_exists(const fs::path& path) {
  pass_hook(IoOp::kStat, "look at", path);
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) return true;
  if (is_damage(errno)) return false;
  throw_io_error("look at", path, errno);
}

std::vector<fs::path> paths_in(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    paths.push_back(it->path());
  if (error) throw_io_error("read folder", folder, error.value());
  return paths;
}

uint64_t regular_file_size(const fs::path& path) {
  pass_hook(IoOp::kStat, "look at", path);
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) throw_io_error("look at", path, errno);
  MEGATRON_CHECK(S_ISREG(info.st_mode), path.string(), ": is not a regular file");
  return static_cast<uint64_t>(info.st_size);
}

void make_directory(const fs::path& path) {
  pass_hook(IoOp::kMkdir, "create folder", path);
  if (::mkdir(path.c_str(), 0777) != 0) throw_io_error("create folder", path, errno);
}

void make_directories(const fs::path& path) {
  std::error_code ignored;
  if (path.empty() || fs::is_directory(path, ignored)) return;
  const fs::path parent = path.parent_path();
  if (parent != path) make_directories(parent);
  pass_hook(IoOp::kMkdir, "create folder", path);
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST)
    throw_io_error("create folder", path, errno);
  MEGATRON_CHECK(fs::is_directory(path, ignored), path.string(), ": exists and is not a folder");
  sync_directory(parent);
}

void sync_directory(const fs::path& path) {
  const fs::path name = path.empty() ? fs::path(".") : path;
  pass_hook(IoOp::kSync, "sync folder", name);
  const int fd = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw_io_error("open folder", name, errno);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  // Some file systems cannot sync a folder and return EINVAL; their renames are durable by other
  // means or not at all.
  if (error != 0 && error != EINVAL) throw_io_error("sync folder", name, error);
}

void rename_path(const fs::path& from, const fs::path& to) {
  pass_hook(IoOp::kRename, "rename", from, to);
  if (::rename(from.c_str(), to.c_str()) != 0)
    throw_io_error(cat("rename to ", to.string(), " the path"), from, errno);
}

bool exchange_paths(const fs::path& a, const fs::path& b) {
  pass_hook(IoOp::kRename, "exchange", a, b);
  if (::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0)
    return true;
  if (errno == EINVAL || errno == ENOSYS) return false;
  throw_io_error(cat("exchange with ", b.string(), " the path"), a, errno);
}

void remove_tree(const fs::path& path, const std::function<void()>& progress) {
  pass_hook(IoOp::kUnlink, "remove", path);
  std::error_code error;
  std::vector<fs::path> entries;
  if (fs::is_directory(fs::symlink_status(path, error)))
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
      entries.push_back(it->path());
  for (const fs::path& entry : entries) {
    fs::remove_all(entry, error);
    if (error) throw_io_error("remove", entry, error.value());
    if (progress) progress();
  }
  fs::remove_all(path, error);
  if (error) throw_io_error("remove", path, error.value());
}

}  // namespace megatron
