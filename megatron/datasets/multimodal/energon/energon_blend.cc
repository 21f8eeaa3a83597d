#include "megatron/datasets/multimodal/energon/energon_blend.h"

#include <charconv>
#include <cmath>
#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/datasets/multimodal/energon/energon_meta.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kMostBlends = 32;  // within one another
constexpr double kMostRepetitions = 1000;

// -- subsets

constexpr const char* kRanges =
    "\nhint: range: [10%, 90%], or samples [100, 200] or [100, end] of a folder";

std::optional<int64_t> sample_number(const json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{INT64_MAX}) return {};
  return value.get<int64_t>();
}

std::optional<double> share_of(const json& value) {
  if (!value.is_string()) return {};
  const std::string text = value;
  double percent = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), percent);
  if (error != std::errc() || end + 1 != text.data() + text.size() || *end != '%' ||
      !(percent >= 0 && percent <= 100))
    return {};
  return percent / 100;
}

EnergonSubset read_subset(const json& given, const std::string& where) {
  MEGATRON_CHECK(given.is_object() && given.size() == 1 && given.contains("range") &&
                     given["range"].is_array() && given["range"].size() == 2,
                 where, ": the subset ", given.dump(), " is none", kRanges);
  const json &first = given["range"][0], &last = given["range"][1];
  EnergonSubset out;
  if (const auto begin = share_of(first), end = share_of(last); begin && end) {
    out.begin = *begin;
    out.end = *end;
  } else {
    out.first = sample_number(first);
    out.last = sample_number(last);
    MEGATRON_CHECK(out.first && (out.last || last == "end"), where, ": the range ",
                   given["range"].dump(), " of a subset is none", kRanges);
  }
  MEGATRON_CHECK(out.begin <= out.end && (!out.last || *out.first <= *out.last), where,
                 ": the range ", given["range"].dump(), " of a subset ends before it begins");
  return out;
}

// The share `outer` of what `inner` takes; samples are counted within a folder alone.
EnergonSubset share_within(const EnergonSubset& inner, const EnergonSubset& outer) {
  EnergonSubset out = inner;
  const double size = inner.end - inner.begin;
  out.begin = inner.begin + outer.begin * size;
  out.end = inner.begin + outer.end * size;
  return out;
}

// -- blends

// What an entry inherits.
struct Outer {
  std::string part;
  double factor = 1;
  std::optional<EnergonSubset> subset;
  int depth = 0;
  bool has_samples() const { return subset && subset->first; }  // numbers of them
};

class BlendReader {
 public:
  void add_file(const fs::path& path, const Outer& outer);
  EnergonBlend out;

 private:
  void add(const fs::path& file, const json& entry, Outer outer);
  void add_blend(const fs::path& file, const json& entry, const char* key, const Outer& outer);
  void add_join(const fs::path& file, const json& entry, const Outer& outer);
  void add_folder(const fs::path& file, const json& entry, const Outer& outer);
};

std::string text_of_entry(const json& entry, const char* key, const std::string& otherwise,
                          const std::string& where) {
  if (!entry.contains(key) || entry[key].is_null()) return otherwise;
  MEGATRON_CHECK(entry[key].is_string(), where, ": ", key, " is ", entry[key].dump(), ", no text");
  return entry[key];
}

fs::path path_of_entry(const fs::path& file, const json& entry) {
  const std::string path = entry["path"];
  MEGATRON_CHECK(path.find("://") == std::string::npos, file.string(), ": ", path,
                 " is no local path: nothing is fetched");
  return (file.parent_path() / path).lexically_normal();
}

void check_keys(const json& entry, const std::string& where) {
  MEGATRON_CHECK(!entry.contains("concat") && !entry.contains("blend_joint"), where, ": ",
                 entry.contains("concat") ? "concat" : "blend_joint",
                 " is not built\nhint: blend and blend_epochized are");
  MEGATRON_CHECK(!entry.contains("aux"), where,
                 ": aux of a data set, for programs that make samples, is not built");
  constexpr const char* kShuffle = "shuffle_over_epochs_multiplier";
  MEGATRON_CHECK(!entry.contains(kShuffle) || entry[kShuffle] == 1, where, ": ", kShuffle,
                 " of a data set is not built: each epoch has every sample once");
}

void BlendReader::add(const fs::path& file, const json& entry, Outer outer) {
  const std::string where = file.string();
  MEGATRON_CHECK(outer.depth < kMostBlends, where, ": blends lie more than ", kMostBlends,
                 " deep within one another");
  ++outer.depth;
  MEGATRON_CHECK(entry.is_object(), where, ": an entry of ", outer.part, " is no object");
  check_keys(entry, where);
  outer.part = text_of_entry(entry, "split_part", outer.part, where);
  if (entry.contains("subset") && !entry["subset"].is_null()) {
    const EnergonSubset own = read_subset(entry["subset"], where);
    outer.subset = outer.subset ? share_within(own, *outer.subset) : own;
  }
  for (const char* key : {"blend", "blend_epochized"})
    if (entry.contains(key)) return add_blend(file, entry, key, outer);
  if (entry.contains("join")) return add_join(file, entry, outer);
  add_folder(file, entry, outer);
}

void BlendReader::add_blend(const fs::path& file, const json& entry, const char* key,
                            const Outer& outer) {
  const std::string where = file.string();
  const bool weights = key == std::string("blend");
  const json& list = entry[key];
  MEGATRON_CHECK(list.is_array() && !list.empty(), where, ": a blend is no list");
  MEGATRON_CHECK(!outer.has_samples(), where,
                 ": a range of samples is one of a folder, not of a blend", kRanges);
  const EnergonMode mode = weights ? EnergonMode::kWeights : EnergonMode::kRepetitions;
  MEGATRON_CHECK(out.mode == EnergonMode::kOne || out.mode == mode, where,
                 ": blend and blend_epochized lie within one another: weights and numbers of "
                 "repetitions do not mix");
  out.mode = mode;
  double sum = 0;
  std::vector<double> factors;
  for (const json& one : list) {
    MEGATRON_CHECK(one.is_object(), where, ": a member of a blend is no object");
    const char* const name = weights ? "weight" : "repetitions";
    const json own = one.contains(name) ? one[name] : json(1.0);
    MEGATRON_CHECK(own.is_number() && own > 0 && std::isfinite(own.get<double>()), where, ": ",
                   weights ? "a weight" : "repetitions", " of a blend is ", own.dump());
    factors.push_back(own.get<double>());
    sum += factors.back();
  }
  for (size_t i = 0; i < factors.size(); ++i) {
    Outer inner = outer;
    inner.factor *= weights ? factors[i] / sum : factors[i];
    MEGATRON_CHECK(weights || inner.factor <= kMostRepetitions, where, ": repetitions of a blend ",
                   "are more than ", kMostRepetitions);
    add(file, list[i], inner);
  }
}

const EnergonType* read_joiner(const json& entry, const std::string& where) {
  const json joiner = entry.contains("joiner") ? entry["joiner"] : json();
  const auto text = [&](const char* key) {
    return joiner.is_object() && joiner.contains(key) && joiner[key].is_string()
               ? joiner[key].get<std::string>()
               : std::string();
  };
  MEGATRON_CHECK(text("__module__").starts_with("megatron.energon") && !text("__class__").empty(),
                 where, ": the joiner of a join is ", joiner.dump().substr(0, 80),
                 ", a program or none, which is not run\nhint: joiner: {__module__: "
                 "megatron.energon, __class__: OCRSample} or another type of samples");
  const std::string name = text("__class__");
  const EnergonType& type = energon_type(name, where);
  MEGATRON_CHECK(type.alone, where, ": the joiner of a join is ", type.name,
                 ", which is no sample with an image and a text");
  return &type;
}

void BlendReader::add_join(const fs::path& file, const json& entry, const Outer& outer) {
  const std::string where = file.string();
  EnergonEntry joined{
      outer.factor, {}, {}, read_joiner(entry, where), outer.subset.value_or(EnergonSubset()),
      where};
  MEGATRON_CHECK(entry["join"].is_array() && !entry["join"].empty(), where,
                 ": a join is no list of data sets\nhint: names of them are for joiners that are "
                 "programs, which are not run");
  for (const json& one : entry["join"]) {
    MEGATRON_CHECK(one.is_object() && one.contains("path") && one["path"].is_string(), where,
                   ": a member of a join has no path");
    check_keys(one, where);
    MEGATRON_CHECK(!one.contains("subset"), where,
                   ": a member of a join has a subset\nhint: a join as a whole may have one");
    const fs::path path = path_of_entry(file, one);
    MEGATRON_CHECK(is_energon_folder(path.string()), path.string(),
                   ": is no folder with .nv-meta/dataset.yaml, which a join needs");
    const std::string nonmatch = text_of_entry(one, "nonmatch", "error", where);
    MEGATRON_CHECK(nonmatch == "error" || nonmatch == "skip" || nonmatch == "none", where,
                   ": nonmatch of a join is ", nonmatch, ", expected skip, none or error");
    MEGATRON_CHECK(!joined.folders.empty() || nonmatch == "error", where,
                   ": nonmatch is for the members of a join behind the first, whose samples are "
                   "the ones that are joined");
    joined.folders.push_back({path.string(), text_of_entry(one, "split_part", outer.part, where),
                              text_of_entry(one, "dataset_config", "", where),
                              text_of_entry(one, "split_config", "", where)});
    joined.nonmatch.push_back(nonmatch == "skip"   ? EnergonNonmatch::kSkip
                              : nonmatch == "none" ? EnergonNonmatch::kNone
                                                   : EnergonNonmatch::kError);
  }
  out.entries.push_back(std::move(joined));
}

void BlendReader::add_folder(const fs::path& file, const json& entry, const Outer& outer) {
  const std::string where = file.string();
  MEGATRON_CHECK(entry.contains("path") && entry["path"].is_string(), where, ": an entry of ",
                 outer.part, " has none of path, join, blend and blend_epochized");
  const fs::path path = path_of_entry(file, entry);
  const EnergonRequest request{path.string(), outer.part,
                               text_of_entry(entry, "dataset_config", "", where),
                               text_of_entry(entry, "split_config", "", where)};
  if (is_energon_blend(path.string())) {
    MEGATRON_CHECK(request.dataset_file.empty() && request.split_file.empty(), where,
                   ": dataset_config and split_config are of a folder, ", path.string(),
                   " is a blend");
    MEGATRON_CHECK(!outer.has_samples(), where,
                   ": a range of samples is one of a folder, not of a blend", kRanges);
    return add_file(path, outer);
  }
  MEGATRON_CHECK(is_energon_folder(path.string()), path.string(),
                 ": is neither a blend nor a folder with .nv-meta/dataset.yaml");
  out.entries.push_back({outer.factor,
                         {request},
                         {EnergonNonmatch::kError},
                         nullptr,
                         outer.subset.value_or(EnergonSubset()),
                         where});
}

void BlendReader::add_file(const fs::path& path, const Outer& outer) {
  const json meta = read_energon_meta(path);
  const std::string where = path.string();
  const bool typed =
      meta.is_object() && meta.contains("__class__") && meta["__class__"].is_string();
  const std::string type = typed ? meta["__class__"] : json("");
  MEGATRON_CHECK(type == "MetadatasetV2", where, ": a blend of type ", type,
                 " is not built\nhint: MetadatasetV2 is");
  MEGATRON_CHECK(meta.contains("splits") && meta["splits"].is_object(), where, ": has no splits");
  if (meta["splits"].contains(outer.part)) return add(path, meta["splits"][outer.part], outer);
  MEGATRON_CHECK(outer.depth == 0, where, ": splits has no ", outer.part,
                 ", which another blend reads");
}

}  // namespace

std::pair<int64_t, int64_t> samples_of(const EnergonSubset& subset, int64_t total,
                                       const std::string& where) {
  int64_t first = subset.first.value_or(0), last = subset.last.value_or(total);
  MEGATRON_CHECK(first <= total && last <= total, where, ": the subset of samples ", first, " to ",
                 last, " ends beyond the ", total, " samples that there are");
  const int64_t count = last - first;
  last = first + static_cast<int64_t>(static_cast<double>(count) * subset.end);
  first += static_cast<int64_t>(static_cast<double>(count) * subset.begin);
  MEGATRON_CHECK(first < last, where, ": the subset holds none of the ", total, " samples");
  return {first, last};
}

bool is_energon_blend(const std::string& path) {
  return (path.ends_with(".yaml") || path.ends_with(".yml")) && fs::is_regular_file(path);
}

EnergonBlend parse_energon_blend(const std::string& path, const std::string& part) {
  BlendReader reader;
  reader.add_file(path, {part, 1, {}, 0});
  return std::move(reader.out);
}

}  // namespace megatron
