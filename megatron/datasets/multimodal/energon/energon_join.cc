#include "megatron/datasets/multimodal/energon/energon_join.h"

#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

using KeyPlaces = std::unordered_map<std::string, EnergonPlace>;

// Calls use(key, place) for each sample that is not excluded, in order. Throws Error for a key
// twice.
template <class Use>
KeyPlaces read_keys(const EnergonFolder& folder, Use&& use) {
  KeyPlaces out;
  for (size_t s = 0; s < folder.shards.size(); ++s) {
    const EnergonShard shard = read_energon_shard(folder, s);
    for (size_t i = 0; i < shard.samples.size(); ++i) {
      const std::string& key = shard.samples[i].key;
      if (is_excluded(folder, s, key)) continue;
      const EnergonPlace place{static_cast<int64_t>(s), static_cast<int64_t>(i)};
      const auto [known, is_new] = out.emplace(key, place);
      MEGATRON_CHECK(is_new, folder.shards[s], ": ", key, ": the key is also one of ",
                     folder.shards[static_cast<size_t>(known->second.shard)],
                     "\nhint: a join needs keys of which a folder has each once");
      use(key, place);
    }
  }
  return out;
}

}  // namespace

void check_join(const EnergonEntry& entry, const EnergonFolders& folders) {
  const EnergonType& joiner = *entry.joiner;
  std::set<std::string> given;
  for (const auto& folder : folders)
    for (const auto& [field, places] : folder->fields) {
      MEGATRON_CHECK(joiner.fields.contains(field) || joiner.optional.contains(field), entry.where,
                     ": the joiner ", joiner.name, " has no field ", field, ", which ",
                     folder->path, " has\nhint: its fields are ", listed(joiner.fields));
      given.insert(field);
    }
  for (const std::string& field : joiner.fields)
    MEGATRON_CHECK(given.contains(field), entry.where, ": no data set of the join has the field ",
                   field, " of its joiner ", joiner.name);
}

EnergonJoin join_keys(const EnergonEntry& entry, const EnergonFolders& folders) {
  std::vector<KeyPlaces> others;
  for (size_t f = 1; f < folders.size(); ++f)
    others.push_back(read_keys(*folders[f], [](const std::string&, const EnergonPlace&) {}));
  EnergonJoin all;
  all.folders = folders.size();
  all.ends.assign(folders[0]->shards.size(), 0);
  const auto add = [&](const std::string& key, const EnergonPlace& place) {
    std::vector<EnergonPlace> row = {place};
    for (size_t f = 1; f < folders.size(); ++f) {
      const auto found = others[f - 1].find(key);
      if (found != others[f - 1].end()) {
        row.push_back(found->second);
        continue;
      }
      if (entry.nonmatch[f] == EnergonNonmatch::kSkip) return;
      MEGATRON_CHECK(entry.nonmatch[f] == EnergonNonmatch::kNone,
                     folders[0]->shards[static_cast<size_t>(place.shard)], ": ", key, ": the part ",
                     folders[f]->part, " of ", folders[f]->path,
                     " has no sample of this key to join\nhint: nonmatch: skip leaves such "
                     "samples out, none joins the others");
      row.emplace_back();
    }
    all.places.insert(all.places.end(), row.begin(), row.end());
    ++all.ends[static_cast<size_t>(place.shard)];
  };
  read_keys(*folders[0], add);
  for (size_t s = 1; s < all.ends.size(); ++s) all.ends[s] += all.ends[s - 1];
  const size_t count = all.ends.back();
  MEGATRON_CHECK(count > 0, entry.where, ": no sample of ", folders[0]->path,
                 " has a key that the other data sets of its join have");
  const auto [first, last] = samples_of(entry.subset, static_cast<int64_t>(count),
                                        cat(entry.where, ": the join of ", folders[0]->path));
  const auto begin = static_cast<size_t>(first), end = static_cast<size_t>(last);
  EnergonJoin out{all.folders, {}, {}};
  const auto at = [&](size_t row) {
    return all.places.begin() + static_cast<std::ptrdiff_t>(row * all.folders);
  };
  out.places.assign(at(begin), at(end));
  for (const size_t row : all.ends) out.ends.push_back(std::clamp(row, begin, end) - begin);
  return out;
}

}  // namespace megatron
