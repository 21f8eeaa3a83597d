#include "megatron/comm/rank_settings.h"

#include <xxhash.h>

#include <algorithm>
#include <map>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

constexpr size_t kShownSettings = 8;  // settings in a report
constexpr size_t kShownRanges = 12;   // ranges in a list of ranks
constexpr size_t kShownBytes = 200;   // bytes of a value

// Ranks grouped by their value, largest group first.
struct Holders {
  std::string value;
  std::vector<int> ranks;
};

std::vector<Holders> holders_of(const std::string& name, const std::vector<SettingsGroup>& groups) {
  std::vector<Holders> all;
  for (const SettingsGroup& group : groups) {
    const auto found =
        std::find_if(group.settings.begin(), group.settings.end(),
                     [&](const RankSetting& setting) { return setting.name == name; });
    const std::string value = found == group.settings.end() ? "unknown" : found->value;
    auto at = std::find_if(all.begin(), all.end(),
                           [&](const Holders& holders) { return holders.value == value; });
    if (at == all.end()) at = all.insert(all.end(), Holders{value, {}});
    at->ranks.insert(at->ranks.end(), group.ranks.begin(), group.ranks.end());
  }
  for (Holders& holders : all) std::sort(holders.ranks.begin(), holders.ranks.end());
  std::sort(all.begin(), all.end(), [](const Holders& a, const Holders& b) {
    return a.ranks.size() != b.ranks.size() ? a.ranks.size() > b.ranks.size() : a.ranks < b.ranks;
  });
  return all;
}

std::string shown(const std::string& value) {
  if (value.empty()) return "not given";
  return value.size() <= kShownBytes ? value : cat(value.substr(0, kShownBytes), "...");
}

std::string describe(const std::string& name, const std::vector<Holders>& all) {
  std::string text = cat(name, " is ");
  for (size_t i = 0; i < all.size(); ++i) {
    if (i == kShownSettings) return cat(text, " and ", all.size() - i, " other values elsewhere");
    if (i > 0) text += i + 1 == all.size() ? " and " : ", ";
    text += cat(shown(all[i].value), " on ", rank_list(all[i].ranks));
  }
  return text;
}

// The names of all groups, in the order of the first group that has each.
std::vector<std::string> names_of(const std::vector<SettingsGroup>& groups) {
  std::vector<std::string> names;
  std::map<std::string, bool> seen;
  for (const SettingsGroup& group : groups)
    for (const RankSetting& setting : group.settings)
      if (seen.emplace(setting.name, true).second) names.push_back(setting.name);
  return names;
}

}  // namespace

std::string digest(const RankSettings& settings) {
  const std::string text = pack_settings(settings);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return format_hex(hash.high64) + format_hex(hash.low64);
}

// "<bytes of name> <bytes of value> <name><value>" for each.
std::string pack_settings(const RankSettings& settings) {
  std::string text;
  for (const RankSetting& setting : settings)
    text += cat(setting.name.size(), " ", setting.value.size(), " ", setting.name, setting.value);
  return text;
}

RankSettings unpack_settings(std::string_view text) {
  RankSettings settings;
  size_t at = 0;
  const auto number = [&] {
    size_t value = 0;
    const size_t begin = at;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9' && at - begin < 18; ++at)
      value = value * 10 + static_cast<size_t>(text[at] - '0');
    MEGATRON_CHECK(at > begin && at < text.size() && text[at] == ' ',
                   "the settings of a rank are garbled in the store");
    ++at;
    return value;
  };
  while (at < text.size()) {
    const size_t name = number(), value = number();
    MEGATRON_CHECK(name <= text.size() - at && value <= text.size() - at - name,
                   "the settings of a rank are garbled in the store");
    settings.push_back(
        {std::string(text.substr(at, name)), std::string(text.substr(at + name, value))});
    at += name + value;
  }
  return settings;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t ranges = 0;
  for (size_t i = 0; i < ranks.size(); ++ranges) {
    if (ranges == kShownRanges) return cat(text, " and ", ranks.size() - i, " more");
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += cat(i > 0 ? ", " : "", ranks[i]);
    if (last > i) text += cat(last > i + 1 ? "-" : ", ", ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string describe_differences(const std::vector<SettingsGroup>& groups) {
  std::string text;
  size_t found = 0;
  for (const std::string& name : names_of(groups)) {
    const std::vector<Holders> all = holders_of(name, groups);
    if (all.size() < 2) continue;
    if (++found > kShownSettings) continue;
    text += cat(found == 1 ? "the ranks do not agree: " : "\ndetail: ", describe(name, all));
  }
  if (found == 0) return "";
  if (found > kShownSettings)
    text += cat("\ndetail: they differ in ", found - kShownSettings, " more settings");
  return text + "\nhint: start every rank with the same flags, input files and program";
}

}  // namespace megatron
