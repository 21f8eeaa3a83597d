#include "megatron/base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"

namespace megatron {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kMaxTransferBytes = size_t{1} << 30;  // Linux transfers at most 2 GiB per call

[[noreturn]] void fail(const char* action, const std::filesystem::path& path, int error) {
  throw_system_error(
      cat("cannot ", action, " ", path.string(), ": ", std::generic_category().message(error)),
      error);
}

// Closes a descriptor when it leaves scope.
struct Descriptor {
  explicit Descriptor(int fd) : fd(fd) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

int open_for_reading(const std::filesystem::path& path, int flags = 0) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  if (fd < 0) fail("open", path, errno);
  return fd;
}

struct stat status_of(int fd, const std::filesystem::path& path) {
  struct stat status;
  if (::fstat(fd, &status) != 0) fail("read", path, errno);
  if (S_ISDIR(status.st_mode)) fail("read", path, EISDIR);
  return status;
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISCHR(mode) || S_ISBLK(mode) ? "a device" : "";
}

[[noreturn]] void refuse_kind(const std::filesystem::path& path, mode_t mode) {
  throw_error(cat("cannot read ", path.string(), ": it is ", kind_of(mode), ", not a regular file",
                  "\nhint: write the data to a file and give its path"));
}

// A pipe made by the shell's <(command) or |: it has no path, and a writer.
bool is_unnamed_pipe(int fd, const struct stat& status) {
  if (!S_ISFIFO(status.st_mode)) return false;
  char target[16];
  const ssize_t length = ::readlink(cat("/proc/self/fd/", fd).c_str(), target, sizeof(target));
  return length > 5 && std::string_view(target, 5) == "pipe:";
}

bool is_null_device(const struct stat& status) {
  return S_ISCHR(status.st_mode) && status.st_rdev == ::makedev(1, 3);
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const Descriptor file(open_regular_file(path));
  const struct stat status = status_of(file.fd, path);
  if (status.st_size == 0) return;
  const size_t size = static_cast<size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail("map", path, errno);
  data_ = static_cast<const std::byte*>(data);
  size_ = size;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

int open_regular_file(const std::filesystem::path& path) {
  Descriptor file(open_for_reading(path, O_NONBLOCK | O_NOCTTY));
  const struct stat status = status_of(file.fd, path);
  if (!S_ISREG(status.st_mode)) refuse_kind(path, status.st_mode);
  return std::exchange(file.fd, -1);
}

int open_input_file(const std::filesystem::path& path) {
  if (path == "/dev/stdin") {  // open already
    const int fd = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) fail("open", path, errno);
    return fd;
  }
  // O_NONBLOCK: opening a FIFO without a writer would block.
  Descriptor file(open_for_reading(path, O_NONBLOCK | O_NOCTTY));
  const struct stat status = status_of(file.fd, path);
  if (is_unnamed_pipe(file.fd, status)) {
    // reads block until the writer writes
    if (::fcntl(file.fd, F_SETFL, 0) != 0) fail("read", path, errno);
  } else if (!S_ISREG(status.st_mode) && !is_null_device(status)) {
    refuse_kind(path, status.st_mode);
  }
  return std::exchange(file.fd, -1);
}

void check_regular_file(const std::filesystem::path& path) {
  const Descriptor opened(open_regular_file(path));
}

void check_input_file(const std::filesystem::path& path) {
  const Descriptor opened(open_input_file(path));
}

std::string read_file(const std::filesystem::path& path, uint64_t most_bytes) {
  const Descriptor file(open_input_file(path));
  const struct stat status = status_of(file.fd, path);
  const auto check = [&](uint64_t bytes) {
    MEGATRON_CHECK(bytes <= most_bytes, "cannot read ", path.string(), ": it is longer than ",
                   most_bytes, " bytes, the most that such a file may have");
  };
  check(static_cast<uint64_t>(std::max<off_t>(status.st_size, 0)));
  std::string contents;
  // The size is only an estimate: pipes and /proc report 0, and a file may grow meanwhile.
  size_t capacity = static_cast<size_t>(std::max<off_t>(status.st_size, 0)) + 1;
  size_t used = 0;
  for (;;) {
    try {
      if (contents.size() < capacity) contents.resize(capacity);
    } catch (const std::exception&) {  // no memory, or longer than any string
      fail("read", path, ENOMEM);
    }
    const ssize_t got = ::read(file.fd, contents.data() + used,
                               std::min(contents.size() - used, kMaxTransferBytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path, errno);
    if (got == 0) break;
    used += static_cast<size_t>(got);
    check(used);
    if (used == contents.size()) capacity = used + std::max(used, kBufferBytes);
  }
  contents.resize(used);
  return contents;
}

struct AtomicFileWriter::Impl {
  std::filesystem::path path, temporary;
  int fd = -1;
  uint64_t bytes = 0;
  std::vector<char> buffer;
  bool committed = false;

  void write_all(const char* data, size_t size) {
    while (size > 0) {
      const ssize_t done = ::write(fd, data, std::min(size, kMaxTransferBytes));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail("write", path, errno);
      data += done;
      size -= static_cast<size_t>(done);
    }
  }

  void flush() {
    write_all(buffer.data(), buffer.size());
    buffer.clear();
  }
};

AtomicFileWriter::AtomicFileWriter(std::filesystem::path path) : impl_(std::make_unique<Impl>()) {
  static std::atomic<uint64_t> counter{0};
  impl_->path = std::move(path);
  // O_EXCL: never writes into a leftover of a dead process with the same id.
  do {
    impl_->temporary = impl_->path;
    impl_->temporary += cat(".tmp-", ::getpid(), "-", counter.fetch_add(1));
    impl_->fd = ::open(impl_->temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (impl_->fd < 0 && errno == EEXIST);
  if (impl_->fd < 0) fail("create", impl_->path, errno);
  impl_->buffer.reserve(kBufferBytes);
}

AtomicFileWriter::~AtomicFileWriter() {
  if (impl_->fd >= 0) ::close(impl_->fd);
  if (!impl_->committed) ::unlink(impl_->temporary.c_str());
}

void AtomicFileWriter::write(const void* data, size_t bytes) {
  MEGATRON_ASSERT(impl_->fd >= 0, "write after commit to ", impl_->path.string());
  const char* source = static_cast<const char*>(data);
  impl_->bytes += bytes;
  if (impl_->buffer.size() + bytes > kBufferBytes) impl_->flush();
  if (bytes >= kBufferBytes)
    impl_->write_all(source, bytes);
  else
    impl_->buffer.insert(impl_->buffer.end(), source, source + bytes);
}

uint64_t AtomicFileWriter::size_bytes() const { return impl_->bytes; }

void AtomicFileWriter::commit() {
  Impl& file = *impl_;
  MEGATRON_ASSERT(file.fd >= 0, "commit twice of ", file.path.string());
  file.flush();
  if (::fsync(file.fd) != 0) fail("write", file.path, errno);
  // Network file systems may report a failed write only here.
  if (::close(std::exchange(file.fd, -1)) != 0) fail("write", file.path, errno);
  if (::rename(file.temporary.c_str(), file.path.c_str()) != 0) fail("replace", file.path, errno);
  file.committed = true;
  sync_path(folder_of(file.path));
}

void write_file_atomically(const std::filesystem::path& path, std::string_view contents) {
  AtomicFileWriter file(path);
  file.write(contents);
  file.commit();
}

void sync_path(const std::filesystem::path& path) {
  const Descriptor file(open_for_reading(path));
  // Some file systems cannot sync a folder and return EINVAL; nothing can be done there.
  if (::fsync(file.fd) != 0 && errno != EINVAL) fail("sync", path, errno);
}

std::filesystem::path cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return std::filesystem::path(cache) / "megatron";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
  return std::filesystem::path(home) / ".cache" / "megatron";
}

}  // namespace megatron
