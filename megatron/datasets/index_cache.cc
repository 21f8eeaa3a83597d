#include "megatron/datasets/index_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string hash_bytes(std::span<const std::byte> bytes) {
  return hex(XXH3_64bits(bytes.data(), bytes.size()));
}

// Holds an exclusive lock on a file while it lives, so that one process of a node builds and the
// others wait.
class FileLock {
 public:
  explicit FileLock(const std::filesystem::path& path) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    MEGATRON_CHECK(fd_ >= 0, path.string(), ": cannot open: ", std::strerror(errno));
    while (::flock(fd_, LOCK_EX) != 0) {
      if (errno == EINTR) continue;
      const int error = errno;
      ::close(fd_);
      throw_error(cat(path.string(), ": cannot lock: ", std::strerror(error)));
    }
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() { ::close(fd_); }

 private:
  int fd_;
};

}  // namespace

std::string hash_text(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return hex(hash.high64) + hex(hash.low64);
}

IndexCache::IndexCache(std::filesystem::path folder, std::string name, std::string description,
                       Once once_per_node)
    : folder_(std::move(folder)),
      stem_(hash_text(description) + "-" + name),
      description_(std::move(description)),
      once_per_node_(std::move(once_per_node)) {}

std::filesystem::path IndexCache::file(const std::string& what) const {
  return folder_ / (stem_ + "-" + what);
}

bool IndexCache::make_folder() const {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (!error && ::access(folder_.c_str(), W_OK | X_OK) == 0) return true;
  log_warning(cat(folder_.string(), ": cannot be written, the sample order is kept in memory only",
                  "\nhint: give a writable folder with --data-cache-path"));
  return false;
}

bool IndexCache::load(std::span<const std::string> names, std::vector<NpyArray>& arrays) const {
  arrays.clear();
  std::error_code ignored;
  const auto description_file = file("description.txt");
  if (!std::filesystem::exists(description_file, ignored)) return false;
  try {
    std::string expected = description_ + "\n";
    for (const std::string& name : names) {
      arrays.emplace_back(file(name + ".npy"));
      expected += name + " " + hash_bytes(arrays.back().bytes()) + "\n";
    }
    MEGATRON_CHECK(read_file(description_file) == expected, description_file.string(),
                   ": does not agree with the arrays beside it");
    return true;
  } catch (const Error& error) {
    log_warning(cat(error.what(), "; building the sample order again"));
    arrays.clear();
    return false;
  }
}

void IndexCache::store(std::span<const CacheArray> arrays) const {
  std::error_code ignored;
  std::filesystem::remove(file("description.txt"), ignored);
  std::string description = description_ + "\n";
  for (const CacheArray& array : arrays) {
    AtomicFileWriter out(file(array.name + ".npy"));
    out.write(npy_header(array.dtype, array.shape));
    out.write(array.bytes.data(), array.bytes.size());
    out.commit();
    description += array.name + " " + hash_bytes(array.bytes) + "\n";
  }
  write_file_atomically(file("description.txt"), description);
}

bool IndexCache::get(
    std::span<const std::string> names,
    const std::function<void(const std::function<void(std::span<const CacheArray>)>& store)>& build,
    std::vector<NpyArray>& arrays) {
  if (load(names, arrays)) return true;
  if (!make_folder()) return false;
  const auto build_and_store = [&] {
    if (load(names, arrays)) return;  // someone else built it while this one waited
    build([this](std::span<const CacheArray> built) { store(built); });
  };
  if (once_per_node_) {
    once_per_node_(build_and_store);
  } else {
    const FileLock lock(file("lock"));
    build_and_store();
  }
  MEGATRON_CHECK(!arrays.empty() || load(names, arrays), file("description.txt").string(),
                 ": the sample order that was just built cannot be read");
  return true;
}

}  // namespace megatron
