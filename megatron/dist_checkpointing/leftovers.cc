#include "megatron/dist_checkpointing/leftovers.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>

#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/ownership.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

bool ends_with_number_after(const std::string& name, std::string_view infix) {
  const size_t at = name.rfind(infix);
  if (at == std::string::npos || at == 0) return false;
  const std::string number = name.substr(at + infix.size());
  return !number.empty() && number.find_first_not_of("0123456789") == std::string::npos;
}

// Sizes and the latest change, without following links. Files that vanish meanwhile are ignored.
void measure(Leftover& leftover) {
  std::error_code ignored;
  fs::file_time_type newest = fs::last_write_time(leftover.path, ignored);
  const auto add = [&](const fs::path& path) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(path, error);
    if (error || fs::is_symlink(status)) return;
    if (fs::is_regular_file(status))
      if (const uint64_t bytes = fs::file_size(path, error); !error) leftover.bytes += bytes;
    if (const auto time = fs::last_write_time(path, error); !error) newest = std::max(newest, time);
  };
  add(leftover.path);
  if (fs::is_directory(fs::symlink_status(leftover.path, ignored)))
    for (fs::recursive_directory_iterator it(leftover.path, ignored), end; !ignored && it != end;
         it.increment(ignored))
      add(it->path());
  leftover.age_seconds = std::max(
      0.0, std::chrono::duration<double>(fs::file_time_type::clock::now() - newest).count());
}

std::optional<Leftover> leftover_at(const fs::path& path) {
  const std::string name = path.filename().string();
  Leftover leftover;
  leftover.path = path;
  if (const std::optional<WriterState> writer = writer_of(path)) {
    leftover.writer = writer->name;
    leftover.owner = writer->alive  ? Leftover::Owner::kAlive
                     : writer->gone ? Leftover::Owner::kGone
                                    : Leftover::Owner::kUnknown;
  } else if (name.rfind("iter_", 0) == 0 && (ends_with_number_after(name, ".unusable-") ||
                                             ends_with_number_after(name, ".replaced-"))) {
    leftover.kind = Leftover::Kind::kSetAside;
  } else {
    return std::nullopt;
  }
  measure(leftover);
  return leftover;
}

}  // namespace

std::vector<Leftover> find_leftovers(const fs::path& root) {
  std::vector<Leftover> found;
  for (const fs::path& path : paths_in(root))
    if (std::optional<Leftover> leftover = leftover_at(path)) found.push_back(std::move(*leftover));
  std::sort(found.begin(), found.end(),
            [](const Leftover& a, const Leftover& b) { return a.path < b.path; });
  return found;
}

bool remove_leftover(const Leftover& leftover) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(leftover.path, ignored))) return false;
  const std::optional<Leftover> now = leftover_at(leftover.path);
  if (!now || !now->is_dead()) return false;
  remove_tree(leftover.path);
  return true;
}

}  // namespace megatron
