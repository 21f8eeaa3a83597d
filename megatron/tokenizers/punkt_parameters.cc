#include "megatron/tokenizers/punkt_parameters.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// Calls line(text, where) for each line, whose end may be \n, \r or both.
void for_each_parameter(const fs::path& path,
                        const std::function<void(std::string_view, const std::string&)>& line) {
  MEGATRON_CHECK(fs::is_regular_file(path), path.string(),
                 ": there is no such file, parameters of ",
                 "Punkt are abbrev_types.txt, sent_starters.txt, collocations.tab and "
                 "ortho_context.tab");
  const std::string text = read_file(path);
  const size_t valid = valid_utf8_prefix(text);
  MEGATRON_CHECK(valid == text.size(), path.string(), ": byte ", valid, " is not UTF-8");
  int64_t number = 1;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = std::min(text.find_first_of("\r\n", begin), text.size());
    line(std::string_view(text).substr(begin, end - begin), cat(path.string(), ": line ", number));
    begin = end + (text.compare(end, 2, "\r\n") == 0 ? 2 : 1);
  }
}

// Both sides of the one tab of a line.
std::pair<std::string_view, std::string_view> at_tab(std::string_view line,
                                                     const std::string& where) {
  const size_t tab = line.find('\t');
  MEGATRON_CHECK(
      tab != std::string_view::npos && line.find('\t', tab + 1) == std::string_view::npos, where,
      " is \"", line.substr(0, 40), "\", expected two entries with a tab between them");
  return {line.substr(0, tab), line.substr(tab + 1)};
}

std::vector<fs::path> nltk_folders() {
  std::vector<fs::path> folders;
  if (const char* data = std::getenv("NLTK_DATA"))
    for (const std::string& folder : split(data, ':')) folders.emplace_back(folder);
  if (const char* home = std::getenv("HOME")) folders.push_back(fs::path(home) / "nltk_data");
  for (const char* folder : {"/usr/share/nltk_data", "/usr/local/share/nltk_data",
                             "/usr/lib/nltk_data", "/usr/local/lib/nltk_data"})
    folders.emplace_back(folder);
  return folders;
}

}  // namespace

uint64_t PunktParameters::hash(std::string_view type) {
  uint64_t hash = kHashStart;
  for (const char c : type) hash = hash_step(hash, c);
  return hash;
}

size_t PunktParameters::place_of(std::string_view type, uint64_t hash) const {
  const size_t mask = entries_.size() - 1;
  for (size_t at = (hash ^ hash >> 32) & mask;; at = (at + 1) & mask) {
    const Entry& entry = entries_[at];
    if (!entry.used || (entry.hash == hash && type == type_at(entry))) return at;
  }
}

uint16_t PunktParameters::facts(std::string_view type, uint64_t hash) const {
  if (type.size() > longest_ || entries_.empty()) return 0;
  return entries_[place_of(type, hash)].facts;
}

bool PunktParameters::is_collocation(std::string_view first, std::string_view second) const {
  uint64_t hashed = hash(first);
  hashed = hash_step(hashed, '\t');
  for (const char c : second) hashed = hash_step(hashed, c);
  const size_t size = first.size() + 1 + second.size();
  if (size > longest_ || entries_.empty()) return false;
  const auto is_pair = [&](std::string_view entry) {
    return entry.size() == size && entry.starts_with(first) && entry[first.size()] == '\t' &&
           entry.ends_with(second);
  };
  const size_t mask = entries_.size() - 1;
  for (size_t at = (hashed ^ hashed >> 32) & mask; entries_[at].used; at = (at + 1) & mask)
    if (entries_[at].hash == hashed && is_pair(type_at(entries_[at]))) return true;
  return false;
}

void PunktParameters::grow() {
  std::vector<Entry> old(std::max<size_t>(64, 2 * entries_.size()));
  old.swap(entries_);
  const size_t mask = entries_.size() - 1;
  for (const Entry& entry : old) {
    if (!entry.used) continue;
    size_t at = (entry.hash ^ entry.hash >> 32) & mask;
    while (entries_[at].used) at = (at + 1) & mask;
    entries_[at] = entry;
  }
}

void PunktParameters::add(std::string_view type, uint16_t facts) {
  if (4 * (used_ + 1) > entries_.size()) grow();
  const uint64_t hashed = hash(type);
  Entry& entry = entries_[place_of(type, hashed)];
  if (!entry.used) {
    entry = {hashed, static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(type.size()), 0,
             true};
    text_ += type;
    ++used_;
    longest_ = std::max(longest_, type.size());
  }
  entry.facts |= facts;
}

void PunktParameters::add_collocation(std::string_view first, std::string_view second) {
  add(first, kPairs);
  add(cat(first, "\t", second), 1);  // types have no tabs
}

PunktParameters read_punkt_parameters(const fs::path& folder) {
  PunktParameters out;
  for_each_parameter(folder / "abbrev_types.txt", [&](std::string_view line, const std::string&) {
    out.add(line, PunktParameters::kAbbreviation);
  });
  for_each_parameter(folder / "sent_starters.txt", [&](std::string_view line, const std::string&) {
    out.add(line, PunktParameters::kStarter);
  });
  for_each_parameter(folder / "collocations.tab",
                     [&](std::string_view line, const std::string& where) {
                       const auto [first, second] = at_tab(line, where);
                       out.add_collocation(first, second);
                     });
  for_each_parameter(
      folder / "ortho_context.tab", [&](std::string_view line, const std::string& where) {
        const auto [type, text] = at_tab(line, where);
        uint16_t facts = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), facts);
        MEGATRON_CHECK(error == std::errc() && end == text.data() + text.size() &&
                           (facts & ~(PunktParameters::kUpper | PunktParameters::kLower)) == 0,
                       where, ": the flags are \"", text,
                       "\", expected a sum of 2, 4, 8, 16, 32 and 64",
                       "\nhint: the file may have been cut");
        out.add(type, facts);
      });
  return out;
}

fs::path find_punkt_parameters(const std::string& language) {
  const std::vector<fs::path> folders = nltk_folders();
  for (const fs::path& folder : folders) {
    std::error_code ignored;
    fs::path found = folder / "tokenizers" / "punkt_tab" / language;
    if (fs::is_directory(found, ignored)) return found;
  }
  throw_error(cat("there is no tokenizers/punkt_tab/", language, " in ",
                  listed(folders, [](const fs::path& folder) { return folder.string(); }),
                  "\nhint: download it with `python -m nltk.downloader punkt_tab`, name its folder "
                  "with --punkt-params, or split without it: --punkt-params none"));
}

}  // namespace megatron
