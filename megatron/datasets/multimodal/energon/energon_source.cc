#include "megatron/datasets/multimodal/energon/energon_source.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/datasets/multimodal/energon/energon_join.h"
#include "megatron/datasets/multimodal/energon/energon_sample.h"

namespace megatron {
namespace {

using nlohmann::json;

// Shards of a folder that were read, a few at a time.
class ShardCache {
 public:
  explicit ShardCache(const EnergonFolder& folder) : folder_(folder) {}
  const EnergonShard& get(size_t shard) {
    const auto found = shards_.find(shard);
    if (found != shards_.end()) return found->second;
    constexpr size_t kMost = 64;
    if (shards_.size() == kMost) shards_.clear();
    return shards_.emplace(shard, read_energon_shard(folder_, shard)).first->second;
  }

 private:
  const EnergonFolder& folder_;
  std::map<size_t, EnergonShard> shards_;
};

bool is_plain(const EnergonEntry& entry, const std::string& part) {
  const EnergonRequest& folder = entry.folders[0];
  return entry.joiner == nullptr && entry.subset.is_whole() && folder.part == part &&
         folder.dataset_file.empty() && folder.split_file.empty();
}

// "FILE.yaml#2" -> FILE.yaml, 2
std::optional<std::pair<std::string, size_t>> member_of_blend(const std::string& path) {
  const size_t sign = path.rfind('#');
  if (sign == std::string::npos || !is_energon_blend(path.substr(0, sign))) return {};
  size_t number = 0;
  const char* const end = path.data() + path.size();
  const auto [at, error] = std::from_chars(path.data() + sign + 1, end, number);
  if (error != std::errc() || at != end) return {};
  return std::pair(path.substr(0, sign), number);
}

}  // namespace

// The shards of an entry.
struct EnergonSource::Piece {
  EnergonEntry entry;
  EnergonFolders folders;
  // Without a join: samples [first, second) of each shard of the folder, and the shards that have
  // some.
  std::vector<std::pair<int64_t, int64_t>> samples;
  std::vector<size_t> shards;
  // With one.
  std::mutex mutex;
  std::optional<EnergonJoin> join;

  explicit Piece(const EnergonEntry& given);
  json description() const;
  void read_folder(size_t shard, const std::function<void(SourceRow)>& emit) const;
  void read_join(size_t shard, const std::function<void(SourceRow)>& emit);
};

EnergonSource::Piece::Piece(const EnergonEntry& given) : entry(given) {
  for (const EnergonRequest& request : entry.folders)
    folders.push_back(read_energon_folder(request));
  const EnergonFolder& folder = *folders[0];
  if (entry.joiner != nullptr) {
    check_join(entry, folders);
    for (size_t s = 0; s < folder.shards.size(); ++s) shards.push_back(s);
    return;
  }
  MEGATRON_CHECK(folder.type->alone, folder.path, ": samples of type ", folder.type->name,
                 " are read in joins alone");
  int64_t total = 0;
  for (const int64_t count : folder.counts) total += count;
  auto [first, last] = std::pair(int64_t{0}, total);
  if (!entry.subset.is_whole())
    std::tie(first, last) = samples_of(
        entry.subset, total, cat(entry.where, ": the part ", folder.part, " of ", folder.path));
  int64_t begin = 0;
  for (size_t s = 0; s < folder.shards.size(); begin += folder.counts[s++]) {
    const int64_t count = folder.counts[s];
    samples.emplace_back(std::clamp<int64_t>(first - begin, 0, count),
                         std::clamp<int64_t>(last - begin, 0, count));
    if (entry.subset.is_whole() || samples.back().first < samples.back().second)
      shards.push_back(s);
  }
}

json EnergonSource::Piece::description() const {
  if (entry.joiner == nullptr && entry.subset.is_whole())
    return json::parse(folders[0]->description);
  json out;
  if (entry.joiner == nullptr) {
    out["folder"] = json::parse(folders[0]->description);
    out["samples"] = json::array();
    for (const size_t shard : shards) out["samples"].push_back(samples[shard]);
    return out;
  }
  out["joiner"] = entry.joiner->name;
  for (size_t f = 0; f < folders.size(); ++f)
    out["join"].push_back({json::parse(folders[f]->description),
                           static_cast<int>(entry.nonmatch[f]), folders[f]->shards.size()});
  const EnergonSubset& subset = entry.subset;
  out["subset"] = {subset.first.value_or(0), subset.last.value_or(-1), subset.begin, subset.end};
  return out;
}

void EnergonSource::Piece::read_folder(size_t shard,
                                       const std::function<void(SourceRow)>& emit) const {
  const EnergonFolder& folder = *folders[0];
  const EnergonShard content = read_energon_shard(folder, shard);
  for (auto i = static_cast<size_t>(samples[shard].first);
       i < static_cast<size_t>(samples[shard].second); ++i) {
    const ShardSample& sample = content.samples[i];
    if (is_excluded(folder, shard, sample.key)) continue;
    emit(energon_row(*folder.type, read_energon_sample(folder, shard, content, sample)));
  }
}

void EnergonSource::Piece::read_join(size_t shard, const std::function<void(SourceRow)>& emit) {
  {
    const std::lock_guard lock(mutex);
    if (!join) join = join_keys(entry, folders);
  }
  std::vector<ShardCache> caches;
  for (const auto& folder : folders) caches.emplace_back(*folder);
  for (size_t row = shard == 0 ? 0 : join->ends[shard - 1]; row < join->ends[shard]; ++row) {
    std::optional<EnergonSample> joined;
    for (size_t f = 0; f < folders.size(); ++f) {
      const EnergonPlace& place = join->places[row * folders.size() + f];
      if (place.shard < 0) continue;
      const auto number = static_cast<size_t>(place.shard);
      const EnergonShard& content = caches[f].get(number);
      EnergonSample own = read_energon_sample(*folders[f], number, content,
                                              content.samples[static_cast<size_t>(place.sample)]);
      if (joined)
        joined->join(std::move(own));
      else
        joined = std::move(own);
    }
    for (const std::string& field : entry.joiner->fields)
      MEGATRON_CHECK(joined->values.contains(field) || (field == "image" && joined->image),
                     joined->name, ": has no ", field,
                     ": the data set that has it lacks the key\nhint: nonmatch: skip leaves such "
                     "samples out");
    emit(energon_row(*entry.joiner, *joined));
  }
}

EnergonSource::EnergonSource(const std::vector<EnergonEntry>& entries) {
  json all = json::array();
  std::set<std::string> seen;
  for (const EnergonEntry& entry : entries) {
    const Piece& piece = *pieces_.emplace_back(std::make_unique<Piece>(entry));
    for (const size_t shard : piece.shards) shards_.push_back(piece.folders[0]->shards[shard]);
    for (size_t f = 1; f < piece.folders.size(); ++f)
      for (const std::string& shard : piece.folders[f]->shards)
        if (seen.insert(shard).second) joined_.push_back(shard);
    repetitions_.push_back({shards_.size(), entry.factor});
    all.push_back(piece.description());
  }
  description_ = (all.size() == 1 ? all[0] : all).dump();
}

EnergonSource::~EnergonSource() = default;

void EnergonSource::read(size_t shard, const std::function<void(SourceRow)>& emit) const {
  for (const std::unique_ptr<Piece>& piece : pieces_) {
    if (shard >= piece->shards.size()) {
      shard -= piece->shards.size();
      continue;
    }
    const size_t number = piece->shards[shard];
    if (piece->entry.joiner == nullptr)
      piece->read_folder(number, emit);
    else
      piece->read_join(number, emit);
    return;
  }
  MEGATRON_ASSERT(false, "a shard beyond the last");
}

bool is_energon(const std::string& path) {
  return is_energon_folder(path) || is_energon_blend(path) || member_of_blend(path).has_value();
}

std::shared_ptr<const EnergonSource> open_energon(const std::string& path,
                                                  const std::string& part) {
  if (is_energon_folder(path))
    return std::make_shared<const EnergonSource>(std::vector<EnergonEntry>{
        {1, {{path, part, {}, {}}}, {EnergonNonmatch::kError}, nullptr, {}, path}});
  const auto member = member_of_blend(path);
  const std::string file = member ? member->first : path;
  const EnergonBlend blend = parse_energon_blend(file, part);
  MEGATRON_CHECK(!blend.entries.empty(), file, ": splits has no ", part);
  if (blend.mode == EnergonMode::kRepetitions) {
    MEGATRON_CHECK(!member || member->second == 0, path, ": blend_epochized has one member, ", file,
                   "#0");
    return std::make_shared<const EnergonSource>(blend.entries);
  }
  const size_t count = blend.entries.size(), number = member ? member->second : 0;
  MEGATRON_CHECK(member || count == 1, file, ": is a blend of ", count,
                 " data sets by weights\nhint: ", file, "#0 to ", file, "#", count - 1,
                 " name its members");
  MEGATRON_CHECK(number < count, path, ": the blend has ", count,
                 count == 1 ? " member" : " members", ", from 0");
  EnergonEntry entry = blend.entries[number];
  entry.factor = 1;
  return std::make_shared<const EnergonSource>(std::vector<EnergonEntry>{entry});
}

std::vector<std::string> read_energon_blend(const std::string& path, const std::string& part) {
  const EnergonBlend blend = parse_energon_blend(path, part);
  const auto name_of = [&](size_t i) {
    const EnergonEntry& entry = blend.entries[i];
    return is_plain(entry, part) ? entry.folders[0].path : cat(path, "#", i);
  };
  const size_t count = blend.entries.size();
  if (blend.mode == EnergonMode::kRepetitions)
    return {count == 1 && blend.entries[0].factor == 1 ? name_of(0) : cat(path, "#0")};
  if (count == 1) return {name_of(0)};
  std::vector<std::string> out;
  for (size_t i = 0; i < count; ++i) {
    out.push_back(json(blend.entries[i].factor).dump());
    out.push_back(name_of(i));
  }
  return out;
}

}  // namespace megatron
