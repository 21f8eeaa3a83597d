#include "megatron/datasets/index_cache.h"

#include <unistd.h>
#include <xxhash.h>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/datasets/detail/once_per_node.h"

namespace megatron {
namespace {

std::string hash_bytes(std::span<const std::byte> bytes) {
  return format_hex(XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace

std::string hash_text(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return format_hex(hash.high64) + format_hex(hash.low64);
}

IndexCache::IndexCache(std::filesystem::path folder, std::string name, std::string description)
    : folder_(std::move(folder)),
      stem_(hash_text(description) + "-" + name),
      description_(std::move(description)) {}

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

bool IndexCache::load(std::span<const std::string> names, std::vector<NpyArray>& arrays) {
  arrays.clear();
  std::error_code ignored;
  const auto description_file = file("description.txt");
  if (!std::filesystem::exists(description_file, ignored)) return false;
  try {
    std::vector<std::filesystem::path> files = {description_file};
    for (const std::string& name : names) {
      files.push_back(file(name + ".npy"));
      arrays.emplace_back(files.back());
    }
    const auto check = [&] {
      std::string expected = description_ + "\n";
      for (size_t i = 0; i < names.size(); ++i)
        expected += names[i] + " " + hash_bytes(arrays[i].bytes()) + "\n";
      MEGATRON_CHECK(read_file(description_file) == expected, description_file.string(),
                     ": does not agree with the arrays next to it");
      return summarize_ ? summarize_(arrays) : std::string();
    };
    const NodeResult result = once_per_node({&folder_, 1}, stem_, files, check);
    summary_ = result.text;
    checked_here_ |= result.computed_here;
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
    if (load(names, arrays)) return;  // another process built it meanwhile
    build([this](std::span<const CacheArray> built) { store(built); });
  };
  {
    const FileLock lock(file("lock"));
    build_and_store();
  }
  MEGATRON_CHECK(!arrays.empty() || load(names, arrays), file("description.txt").string(),
                 ": the sample order that was just built cannot be read");
  return true;
}

}  // namespace megatron
